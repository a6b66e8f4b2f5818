"""Stages: what happens to a flat tensor, and what is remembered from flight to flight.

    state = stage.init(bucket, comm)
    x     = stage(x, state, comm.at(round, step))      # may overwrite x; updates state in place

A stage is a frozen declaration: it holds hyperparameters only, compares by value, and prints as the expression that
built it. Its state is a nested dict of tensors, one level for each nested stage, under the name of the field that
holds it. Time is an argument: `comm.round` is the ordinal of the flight, `comm.step` the number of optimizer steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from .buckets import Bucket
from .comm import Comm
from .compressors import Compressor, MinMaxUInt8
from .expressions import expression
from .lanes import temporaries
from .primitives import compressed_mean_, mean_, neighbor_mean_, sparse_mean_
from .topology import Topology

State = dict[str, Any]
Carry = Literal["keep", "mean", "zero", "anew"]


@dataclass(frozen=True)
class Stage:
    """One thing that happens to a flat tensor of a bucket. What the rest of the package must know, classes declare.
    What a stage cannot be made of raises a TypeError as it is made; a group that it cannot work in, a ValueError.

    Attributes:
        lossy: the call takes `residual=`, an fp32 tensor as long as `x`, and writes there what it lost.
        agrees: all ranks end with the same bits, whatever they began with.
        elementwise: the entries of the state that are as long as the bucket, and what becomes of each when the number
            of ranks changes: "keep" this rank's, the "mean" of all ranks', "zero", or "anew": `init` makes the state
            again from the weights as they are. Entries that are not named are made anew when the buckets or the ranks
            change.
        follows: the entries of the state that are copies of the weights, and so follow an outside load of the model.
        needs_shapes: it works on the parameters' shapes, and cannot be given a shard.
        shards: what it gives to the stages that it holds are shards of the bucket.
    """

    lossy: ClassVar[bool] = False
    agrees: ClassVar[bool] = False
    elementwise: ClassVar[Mapping[str, Carry]] = {}
    follows: ClassVar[tuple[str, ...]] = ()
    needs_shapes: ClassVar[bool] = False
    shards: ClassVar[bool] = False

    def check(self, comm: Comm) -> None:
        """Raise a ValueError, in words, if this stage cannot work in this group."""
        for inner in self.nested().values():
            inner.check(comm)

    def multiple_of(self, comm: Comm) -> int:
        """The number of values of which a bucket should be a multiple, so that nothing need be copied."""
        return max([1, *(inner.multiple_of(comm) for inner in self.nested().values())])

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """What is remembered about this bucket before its first flight. All ranks call it together."""
        return {name: inner.init(bucket, comm) for name, inner in self.nested().items()}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        """One flight of `x` (n,): what becomes of it. All ranks call it."""
        raise NotImplementedError

    def nested(self) -> dict[str, "Stage"]:
        """The stages that this one holds, by the names of their fields."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in held.items() if isinstance(value, Stage)}

    def remembers(self) -> bool:
        """Whether a flight depends on the flights before it."""
        return bool(self.elementwise) or any(inner.remembers() for inner in self.nested().values())

    def wants_shapes(self) -> bool:
        """Whether it, or a stage in it, works on the parameters' shapes."""
        return self.needs_shapes or any(inner.wants_shapes() for inner in self.nested().values())

    def copies_weights(self) -> bool:
        """Whether the state holds copies of the weights."""
        return bool(self.follows) or any(inner.copies_weights() for inner in self.nested().values())

    def __repr__(self) -> str:
        return expression(self)


@dataclass(frozen=True, repr=False)
class Mean(Stage):
    """The exact mean over all ranks:  x ← (1/n) Σ_r x_r."""

    agrees: ClassVar[bool] = True

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        return mean_(x, comm)  # type: ignore[no-any-return]


@dataclass(frozen=True, repr=False)
class CompressedMean(Stage):
    """The mean over all ranks of compressed values, compressed again:  x ← Q((1/n) Σ_r Q(x_r)); a few only once.

    Q is what `compressor` keeps.
    """

    compressor: Compressor = MinMaxUInt8()
    lossy: ClassVar[bool] = True
    agrees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise TypeError(f"CompressedMean takes a compressor such as MinMaxUInt8(), not {self.compressor!r}")
        if not self.compressor.dense:
            raise TypeError(f"{self.compressor!r} keeps other places on each rank; use SparseMean({self.compressor!r})")

    def multiple_of(self, comm: Comm) -> int:
        return 64 * comm.size

    def init(self, bucket: Bucket, comm: Comm) -> State:
        if comm.size > 1:  # now, so that no rank's first step waits for a compiler
            self.compressor.warm_up(bucket.flat.device, bucket.flat.dtype, bucket.flat.numel())
        return {}

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        return compressed_mean_(x, self.compressor, comm, residual=residual)  # type: ignore[no-any-return]


@dataclass(frozen=True, repr=False)
class SparseMean(Stage):
    """The mean over all ranks of what a sparse compressor keeps of each:  x ← (1/n) Σ_r keep(x_r)."""

    compressor: Compressor
    lossy: ClassVar[bool] = True
    agrees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.compressor, Compressor):
            raise TypeError(f"SparseMean takes a compressor such as TopK(0.01), not {self.compressor!r}")

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        return sparse_mean_(x, self.compressor, comm, residual=residual)  # type: ignore[no-any-return]


@dataclass(frozen=True, repr=False)
class NeighborMean(Stage):
    """The mean with this round's neighbours:  x ← Σ_j w_rj x_j, for W the topology's matrix of the round."""

    topology: Topology

    def __post_init__(self) -> None:
        check_topology("NeighborMean", self.topology)

    def check(self, comm: Comm) -> None:
        self.topology.check(comm.size)
        if not self.topology.doubly_stochastic(comm.size):
            raise ValueError(
                f"{self.topology!r} is not doubly stochastic for {comm.size} ranks, so its mean would drift; "
                "use Ring() or OnePeerExact(), or push_sum for a directed graph"
            )

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        return neighbor_mean_(x, self.topology, comm)  # type: ignore[no-any-return]


@dataclass(frozen=True, repr=False)
class Hierarchical(Stage):
    """Average within each node; run `inner` between the nodes, each rank on its own shard; gather within the node.

        s ← shard of (1/L) Σ x over the L ranks of a node;   s ← inner(s) between nodes;   x ← all s of the node

    Every rank sends 1/L of what a flat algorithm would send between nodes.
    """

    inner: Stage
    shards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_stage("Hierarchical", self.inner)
        if self.inner.wants_shapes():
            raise TypeError(
                f"{self.inner!r} needs the shapes of the parameters, and Hierarchical gives it shards without any"
            )

    @property
    def agrees(self) -> bool:  # type: ignore[override]
        """As the stage inside."""
        return self.inner.agrees

    def check(self, comm: Comm) -> None:
        if not comm.hierarchical:
            raise ValueError(
                f"{self!r} must know the nodes: pass comm=Comm(mesh=…) "
                'with a DeviceMesh of dimensions ("inter", "intra")'
            )
        self.inner.check(comm.inter)

    def multiple_of(self, comm: Comm) -> int:
        return comm.intra.size * self.inner.multiple_of(comm.inter)

    def init(self, bucket: Bucket, comm: Comm) -> State:
        size, rank = comm.intra.size, comm.intra.rank
        shard = _padded(bucket.flat, size).chunk(size)[rank].clone()
        return {"inner": self.inner.init(Bucket.of(shard), comm.inter)}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        intra = comm.intra
        shard = intra.reduce_scatter(_padded(x.mul_(1 / intra.size), intra.size)) if intra.size > 1 else x
        shard = self.inner(shard, state["inner"], comm.inter)
        return x.copy_(intra.all_gather(shard)[: x.numel()]) if intra.size > 1 else shard


def _padded(x: Tensor, multiple_of: int) -> Tensor:
    missing = -x.numel() % multiple_of
    return torch.cat([x, x.new_zeros(missing)]) if missing else x


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Stage):
    """What `inner` loses in one flight is added to the next:  y ← x + e;  x ← inner(y);  e ← what that lost of y.

    Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847. The residual e is fp32 whatever x is. A flight with a
    value that is not finite passes it on and leaves e as it was, decided on the device from the result, which is the
    same on all ranks.
    """

    inner: Stage
    elementwise: ClassVar[Mapping[str, Carry]] = {"residual": "mean"}

    def __post_init__(self) -> None:
        check_stage("ErrorFeedback", self.inner)
        if isinstance(self.inner, Hierarchical) and self.inner.inner.lossy:
            raise TypeError(
                f"what {self.inner!r} loses is lost between nodes; "
                f"say Hierarchical(ErrorFeedback({self.inner.inner!r}))"
            )
        if not self.inner.lossy:
            raise TypeError(
                f"ErrorFeedback feeds back what a stage loses, and {self.inner!r} loses nothing; try CompressedMean()"
            )

    @property
    def agrees(self) -> bool:  # type: ignore[override]
        """As the stage inside."""
        return self.inner.agrees

    def init(self, bucket: Bucket, comm: Comm) -> State:
        return {"residual": torch.zeros_like(bucket.flat, dtype=torch.float32), "inner": self.inner.init(bucket, comm)}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return self.inner(x, state["inner"], comm)
        e = state["residual"]
        with temporaries() as new:
            fed, lost = x.add_(e) if x.dtype == e.dtype else x + e, new(e)
            y = self.inner(fed, state["inner"], comm, residual=lost)  # type: ignore[call-arg]
            keep_(e, lost, where=finite(y))
            return x.copy_(y)  # nothing, where that is x


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


def check_stage(holder: str, stage: Any) -> None:
    """Raise a TypeError, in which `holder` takes stages, unless `stage` is a Stage."""
    if not isinstance(stage, Stage):
        raise TypeError(f"{holder} takes a stage such as Mean(), not {stage!r}")


def check_topology(holder: str, topology: Any) -> None:
    """Raise a TypeError, in which `holder` takes topologies, unless `topology` is a Topology."""
    if not isinstance(topology, Topology):
        raise TypeError(f"{holder} takes a topology such as Ring(), not {topology!r}")


def finite(x: Tensor) -> Tensor:
    """Whether every value of `x` is finite: a bool on the device of `x`, without a synchronisation."""
    if x.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=x.device)
    low, high = torch.aminmax(x)  # both are NaN if one value is
    return torch.isfinite(torch.maximum(high, -low))


def keep_(state: Tensor, new: Tensor, where: Tensor) -> Tensor:
    """state ← new where the bool `where` is true; else it stays as it was."""
    if where.is_cpu:  # to ask waits for nothing
        return state.copy_(new) if where else state
    return torch.where(where, new, state, out=state)
