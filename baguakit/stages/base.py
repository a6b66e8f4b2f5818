"""A stage, and its state."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..arguments import checked
from ..buckets import Bucket
from ..comm import FLAT, Comm
from ..expressions import expression
from ..primitives.compressed import prepare

Carry = Literal["keep", "mean", "zero", "anew"]
State = dict[str, Any]
CHECKED = {"check", "multiple_of", "init", "__call__"}  # what is checked of every stage


@dataclass(frozen=True)
class Stage:
    """One thing that happens to the flat tensor of a bucket. Each class declares what the rest of the package needs.

    The constructor raises a TypeError for arguments that cannot work, and `check` a ValueError for a group that cannot.

    Attributes:
        lossy: the call takes `residual=`, an fp32 tensor as long as `x`, and writes there what it lost.
        agrees: all ranks end with the same bits, whatever they began with.
        averages: the result is an average of `x` over ranks, to which a second backward may add its gradients. If not,
            that is refused.
        keeps: what it remembers changes by `keep_` only, which keeps nothing where a result is not finite. What other
            stages remember is copied before a flight of gradients.
        elementwise: the entries of the state that are as long as the bucket, and what becomes of each when the number
            of ranks changes: "keep" this rank's, the "mean" of all ranks', "zero", or "anew": `init` makes the state
            again from the weights as they are. Entries not named are made anew when the buckets or the ranks change.
        follows: the entries of the state that are copies of the weights, and so follow an outside load of the model.
        derived: the entries of the state that `init` finds out from the bucket alone: they are not saved.
        needs_shapes: it works on the parameters' shapes, and cannot be given a shard.
        shards: what it gives to the stages that it holds are shards of the bucket.
        needs_groups: through which groups of a Comm it sends by itself: "flat", or "intra" and "inter", the nodes. An
            attachment makes no groups for nodes that none of its stages names.
    """

    lossy: ClassVar[bool] = False
    agrees: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    keeps: ClassVar[bool] = False
    elementwise: ClassVar[Mapping[str, Carry]] = {}
    follows: ClassVar[tuple[str, ...]] = ()
    derived: ClassVar[tuple[str, ...]] = ()
    needs_shapes: ClassVar[bool] = False
    shards: ClassVar[bool] = False
    needs_groups: ClassVar[frozenset[str]] = frozenset({FLAT})

    def __init_subclass__(cls) -> None:
        """Check what the methods of every stage are given, once for all of them."""
        for name in CHECKED & vars(cls).keys():
            setattr(cls, name, checked(vars(cls)[name], like=getattr(Stage, name)))

    def check(self, comm: Comm) -> None:
        """Raise a ValueError, in words, if this stage cannot work in this group."""
        for inner in self.nested().values():
            inner.check(comm)

    def multiple_of(self, comm: Comm) -> int:
        """The number of values of which a bucket should be a multiple, so that nothing need be copied."""
        return max([1, *(inner.multiple_of(comm) for inner in self.nested().values())])

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Return the state of this bucket before its first flight. All ranks call it together."""
        prepare(self, bucket.flat, comm)
        return {name: inner.init(bucket, comm) for name, inner in self.nested().items()}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        """One flight of `x` (n,): what becomes of it. All ranks call it."""
        raise NotImplementedError

    def nested(self) -> dict[str, "Stage"]:
        """The stages that this one holds, by the names of their fields."""
        return {f.name: held for f in fields(self) if isinstance(held := getattr(self, f.name), Stage)}

    def remembers(self) -> bool:
        """Whether a flight depends on the flights before it."""
        return bool(self.elementwise) or any(inner.remembers() for inner in self.nested().values())

    def wants_shapes(self) -> bool:
        """Whether it, or a stage in it, works on the parameters' shapes."""
        return self.needs_shapes or any(inner.wants_shapes() for inner in self.nested().values())

    def wants_groups(self) -> frozenset[str]:
        """Return through which groups of a Comm it, and the stages in it, send."""
        return frozenset(self.needs_groups).union(*(inner.wants_groups() for inner in self.nested().values()))

    def copies_weights(self) -> bool:
        """Whether the state holds copies of the weights."""
        return bool(self.follows) or any(inner.copies_weights() for inner in self.nested().values())

    def guards(self) -> bool:
        """Return whether it, and every stage in it, changes what it remembers by `keep_` only."""
        return self.keeps and all(inner.guards() for inner in self.nested().values())

    def __repr__(self) -> str:
        return expression(self)


for _name in CHECKED:
    setattr(Stage, _name, checked(getattr(Stage, _name)))


def flown(stage: Stage, x: Tensor, state: State, comm: Comm) -> Tensor:
    """`stage(x, state, comm)`.

    Raises:
        TypeError: that is no tensor of the shape of `x`; names the stage.
    """
    result: Any = stage(x, state, comm)
    if not isinstance(result, Tensor) or result.shape != x.shape:
        found = f"a tensor {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)
        raise TypeError(f"{stage!r} returned {found}; a stage returns what becomes of x, a tensor {tuple(x.shape)}")
    return result
