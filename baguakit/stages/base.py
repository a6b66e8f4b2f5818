"""A stage, and its state."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..arguments import Doors
from ..buckets import Bucket
from ..comm import FLAT, Comm, to_device
from ..compressors import Compressor
from ..costs import Cost, Load, Place
from ..expressions import expression
from ..keeping import finite, tensors_of
from ..lanes import Phases, whole

Carry = Literal["keep", "mean", "zero", "anew"]
State = dict[str, Any]


@dataclass(frozen=True)
class Stage(Doors):
    """A function on the flat tensor of a bucket. Each class declares what the rest of the package needs to know.

    The constructor raises a TypeError for invalid arguments, and `check` a ValueError if the group does not fit.

    A class needs `__call__` (or `phases`), and `init` if its state does not begin as fp32 zeros. The default `init`
    also warms up compressors and nested stages. All other declarations have defaults; `cost` is for `bk.tune`.

    Attributes:
        lossy: the call takes `residual=`, an fp32 tensor as long as `x`, and writes the compression error there.
        same_on_all_ranks: all ranks end with the same bits, whatever values they begin with.
        averages: the result is an average of `x` over ranks, to which a second backward may add its gradients. If
            False, a second backward raises an error.
        keeps: its state changes by `update_if_finite_` only. Other states are copied before a flight of gradients.
        elementwise: the entries of the state that are as long as the bucket, and how each is carried over when the
            number of ranks changes: "keep" (this rank's values), "mean" (over all ranks), "zero", or "anew" (`init`
            makes the state again from the current weights). Other entries are made again when the buckets or the ranks
            change. Entries that are neither tensors nor dicts of tensors are not saved.
        follows: the entries of the state that are copies of the weights. They change when the model is loaded.
        anchored: the result is the next value of an `anchor` in the state, equal on all ranks; `inner` averages.
        one_sided: a flight waits for no rank, so that ranks may make different numbers of flights.
        needs_shapes: the stage needs the shapes of parameters, and cannot work on a shard.
        shards: the nested stages work on shards of the bucket.
        needs_groups: the groups of a Comm that it uses: "flat"; or "intra" and "inter" (within and between nodes).
    """

    lossy: ClassVar[bool] = False
    same_on_all_ranks: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    keeps: ClassVar[bool] = False
    elementwise: ClassVar[Mapping[str, Carry]] = {}
    follows: ClassVar[tuple[str, ...]] = ()
    anchored: ClassVar[bool] = False
    one_sided: ClassVar[bool] = False
    needs_shapes: ClassVar[bool] = False
    shards: ClassVar[bool] = False
    needs_groups: ClassVar[frozenset[str]] = frozenset({FLAT})
    doors: ClassVar[frozenset[str]] = frozenset({"check", "multiple_of", "init", "prepare", "cost", "__call__"})
    _unchecked_call: ClassVar[Callable[..., Any]]

    def check(self, comm: Comm) -> None:
        """Raise a ValueError if this stage cannot work in this group."""
        for inner in self.nested().values():
            inner.check(comm)

    def multiple_of(self, comm: Comm) -> int:
        """Return m such that a bucket whose length is a multiple of m needs no copies for padding."""
        return max([1, *(inner.multiple_of(comm) for inner in self.nested().values())])

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Return the state of the stage for this bucket before the first flight. All ranks call it together.

        By default it holds fp32 zeros for each name in `elementwise`, and the states of nested stages.
        """
        self.prepare(bucket.flat, comm)
        zeros = {name: torch.zeros_like(bucket.flat, dtype=torch.float32) for name in self.elementwise}
        return zeros | {name: inner.init(bucket, comm) for name, inner in self.nested().items()}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        """Return the result of one flight of `x` (n,). All ranks call it."""
        result: Tensor = whole(self.phases(x, state, comm))
        return result

    def phases(self, x: Tensor, state: State, comm: Comm) -> Phases:
        """Do one flight in phases. Define it in place of `__call__` to let the phases of several buckets overlap.

        Between two phases, the generator yields the tensors that the next phase reads. It returns the result. Phases 1,
        3, 5 … send only within nodes (`comm.intra`); the other phases send only between nodes (`comm.inter`). Or else
        collectives are called in the first phase only, and no message of the second has a tag of the first.
        """
        if type(self).__call__ is Stage.__call__:
            raise NotImplementedError(f"{type(self).__name__} defines neither __call__ nor phases")
        return self(x, state, comm)
        yield  # it is a generator

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of one flight of `load`, for `bk.tune`; raise a TypeError if this stage declares none."""
        raise TypeError(f"{type(self).__name__} has no cost: give it a method cost(load, place) that returns a Cost")

    def prepare(self, x: Tensor, comm: Comm) -> None:
        """Warm up the compressors for tensors like `x`, so that no training step waits for a compiler."""
        for each in self.compressors() if comm.size > 1 else ():
            each.warm_up(x.device, x.dtype, x.numel())

    def compressors(self) -> tuple[Compressor, ...]:
        """Return the compressors in the fields of this stage. Compressors of nested stages are not included."""
        return tuple(held for f in fields(self) if isinstance(held := getattr(self, f.name), Compressor))

    def nested(self) -> dict[str, "Stage"]:
        """Return the stages nested in this stage, by the names of their fields."""
        return {f.name: held for f in fields(self) if isinstance(held := getattr(self, f.name), Stage)}

    def whole(self) -> list["Stage"]:
        """Return this stage and all stages nested in it, at any depth."""
        return [self, *(each for inner in self.nested().values() for each in inner.whole())]

    def remembers(self) -> bool:
        """Return whether this or a nested stage declares a state (`elementwise`) that later flights depend on."""
        return bool(self.elementwise) or any(inner.remembers() for inner in self.nested().values())

    def wants_groups(self) -> frozenset[str]:
        """Return the groups of a Comm that this stage and its nested stages use."""
        return frozenset(self.needs_groups).union(*(inner.wants_groups() for inner in self.nested().values()))

    def __repr__(self) -> str:
        return expression(self)

    def _on(self, comm: Comm) -> "Stage":
        """Return the stage with the numbers that it takes in this group in place of None, as reports show it."""
        return self

    def _known_loss(self, every: Any, ranks: int, adam: bool) -> str:
        """Return why it ends behind on so many ranks, as measured by `bench.frontier`, or ""; `adam`: they use Adam."""
        return ""

    def _call_with_check(self, x: Tensor, state: State, comm: Comm, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the result, and whether it is all finite. Override this if the stage's own kernels can test this."""
        y = self(x, state, comm, residual=residual)  # type: ignore[call-arg]
        return y, finite(y)


def init_stage(stage: Stage, bucket: Bucket, comm: Comm) -> State:
    """Return the state of a stage for a bucket, on the device where flights of the bucket compute."""
    if comm._home(bucket.flat.device) != bucket.flat.device:
        bucket = Bucket.of(comm._at_home(bucket.flat), bucket.params)
    return stage.init(bucket, comm)


def call_stage(stage: Stage, x: Tensor, state: State, comm: Comm) -> Tensor:
    """Return `stage(x, state, comm)`, computed where flights of `x` compute; raise a TypeError for another shape."""
    here = x if x.is_cpu else comm._at_home(x)
    result = fitting(stage, x, stage._unchecked_call(here, state, comm))
    return result if here is x else to_device(x, result)


def in_phases(stage: Stage, x: Tensor, state: State, comm: Comm, check: Callable[[], None]) -> Phases:
    """Do the same as `call_stage`, phase by phase, and call `check` between two phases."""
    here = x if x.is_cpu else comm._at_home(x)
    phases = stage.phases(here, state, comm)
    while True:
        try:
            read = next(phases)
        except StopIteration as end:
            result = fitting(stage, x, end.value)
            return result if here is x else to_device(x, result)
        yield read
        check()


def has_phases(stage: Stage) -> bool:
    """Return whether a stage defines `phases`. A subclass that defines another `__call__` only has none."""
    first = next(each for each in type(stage).__mro__ if not vars(each).keys().isdisjoint({"__call__", "phases"}))
    return first is not Stage and "phases" in vars(first)


def fitting(stage: Stage, x: Tensor, result: Any) -> Tensor:
    if isinstance(result, Tensor) and result.shape == x.shape:
        return result
    found = f"a tensor {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)
    raise TypeError(f"{stage!r} returned {found}; a stage returns what becomes of x, a tensor {tuple(x.shape)}")


def remembered(stage: Stage, state: State, carried: bool = True, at: str = "") -> Iterator[tuple[str, Tensor, Any]]:
    """Yield (path, tensor, carry) for every tensor of a state. `carry` is its entry in `elementwise`, or None."""
    nested = stage.nested()
    for name in state:  # in order, equal on all ranks
        if name in nested and isinstance(state[name], dict):
            yield from remembered(nested[name], state[name], carried and not stage.shards, f"{at}{name}.")
        else:
            carry = stage.elementwise.get(name) if carried else None
            yield from ((path, tensor, carry) for path, tensor in tensors_of(state[name], f"{at}{name}"))
