"""Stages that average, and stages around another stage."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from ..arguments import Declared, Range
from ..buckets import Bucket
from ..comm import INTER, INTRA, Comm, weighed
from ..compressors import Compressor, MinMaxUInt8, check_dense
from ..costs import FP32, Cost, Load, Place, degree, exchange, ring, rounds_of
from ..keeping import finite, room_for, update_if_finite_
from ..lanes import Phases, temporaries, whole
from ..primitives import compressed_all_gather, compressed_mean_, mean_, neighbor_mean_, scattered_mean, sparse_mean_
from ..primitives.compressed import in_one_hop, mean_in_phases, pays, pieces_of, sparse_mean_with_check_
from ..primitives.neighbors import is_mean, is_symmetric
from ..topology import Topology
from .base import Carry, Stage, State, has_phases


@dataclass(frozen=True, repr=False)
class Average(Stage):
    """A stage whose result is an average of `x`, equal on all ranks."""

    same_on_all_ranks: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    keeps: ClassVar[bool] = True


@dataclass(frozen=True, repr=False)
class Mean(Average):
    """The exact mean over all n ranks r:  x ← (1/n) Σ_r c_r x_r.  c_r is `comm.share`, 1 without weights."""

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        return mean_(x, comm)

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of an all-reduce of `load`, and of one copy of its values."""
        if place.ranks == 1:
            return Cost()
        n, S = place.ranks, load.size
        apart = place.copies(1, S) + exchange(place.link.all_reduce, 2 * (n - 1), ring(n) * S)
        return place.in_one_kernel("mean", S, ring(n) * S) or apart


@dataclass(frozen=True, repr=False)
class CompressedMean(Average):
    """The compressed mean, over all n ranks r, of compressed values:  x ← Q((1/n) Σ_r Q(c_r x_r)).

    Q(x) is x compressed and decompressed by `compressor`; small buckets are compressed once. c_r is as in `Mean`.
    """

    compressor: Compressor = MinMaxUInt8()
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_dense("compressor", self.compressor)

    def multiple_of(self, comm: Comm) -> int:
        return 64 * comm.size

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        return compressed_mean_(x, self.compressor, comm, residual=residual)

    def phases(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Phases:
        if not x.is_contiguous():
            return self(x, state, comm, residual=residual)
        yield from mean_in_phases(x, self.compressor, comm, residual, check=False)
        return x

    def _call_with_check(self, x: Tensor, state: State, comm: Comm, residual: Tensor) -> tuple[Tensor, Tensor]:
        if type(self) is not CompressedMean or not x.is_contiguous():  # a subclass may do something else
            return super()._call_with_check(x, state, comm, residual)
        ok = whole(mean_in_phases(x, self.compressor, comm, residual))
        return x, finite(x) if ok is None else ok

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost for packed values, or the cost of `Mean` if packed values are not shorter.

        `baguakit.costs` defines the letters.
        one hop     w = row(N) to each other rank                q = N (compress + n decompress)             P = 1
        two hops    w = row(N/n), scattered and gathered         q = N (compress + reduce + decompress)      P ≤ 8
        """
        n, N, c = place.ranks, load.values, self.compressor
        if n == 1 or not pays(N, load.value_bytes, c, n):
            return Mean().cost(load, place)
        one_hop = in_one_hop(N, c, n)
        b, speed = c.row_bytes(N if one_hop else -(-N // n)), place.network.codec(c)
        if (joint := place.in_one_kernel(repr(c), FP32 * N, (1 if one_hop else 2) * (n - 1) * b)) is not None:
            return joint
        if one_hop:
            return exchange(place.link.to_all, 1, (n - 1) * b, N * (speed.compress + n * speed.decompress))
        return place.shards(b, N * (speed.compress + speed.reduce + speed.decompress), pieces_of(N, place.gpu))


@dataclass(frozen=True, repr=False)
class SparseMean(Declared, Average):
    """The mean, over n ranks r, of the entries that a sparse compressor keeps:  x ← (1/n) Σ_r keep(c_r x_r)."""

    compressor: Compressor
    lossy: ClassVar[bool] = True

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        return sparse_mean_(x, self.compressor, comm, residual=residual)

    def _call_with_check(self, x: Tensor, state: State, comm: Comm, residual: Tensor) -> tuple[Tensor, Tensor]:
        if type(self) is not SparseMean or not x.is_contiguous():
            return super()._call_with_check(x, state, comm, residual)
        ok = sparse_mean_with_check_(x, self.compressor, comm, residual)
        return x, finite(x) if ok is None else ok

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of an all-gather of packed values, of one compression, and of n additions for n ranks."""
        n, N, c = place.ranks, load.values, self.compressor
        if n == 1:
            return Cost()
        speed, sent = place.network.codec(c), (n - 1) * c.row_bytes(N)
        return exchange(place.link.exchange, n - 1, sent, N * (speed.compress + n * speed.reduce))


@dataclass(frozen=True, repr=False)
class OnGraph(Declared, Stage):
    """A stage that exchanges with the neighbours in a graph. The graph must have the properties `needs`."""

    topology: Topology
    copies: ClassVar[float] = 0  # of fp32 values, which take as long as its arithmetic beside the mean
    exchanges: ClassVar[bool] = False  # in rounds that are the exact mean as well
    joint: ClassVar[bool] = True  # by `neighbor_mean_`, which may go in one kernel
    needs: ClassVar[tuple[str, ...]] = ()  # methods of the topology
    refusal: ClassVar[str] = ""  # of a {topology} for {n} ranks that has them not, by this {stage}
    constant_weights: ClassVar[bool] = False  # its state depends on the weights of ranks, which must not change

    def check(self, comm: Comm) -> None:
        t, n = self.topology, comm.size
        t.check(n)
        if not all(getattr(t, need)(n) for need in self.needs):
            raise ValueError(self.refusal.format(stage=self, topology=t, n=n))
        weights = comm._weights if "doubly_stochastic" in self.needs else None
        idle = [rank for rank, (weight, *_) in enumerate(weights or ()) if not weight]
        if idle and not is_symmetric(t, n):
            raise ValueError(
                f"rank {idle[0]} has the weight 0, with which no ranks mix over {t!r}: it is not symmetric; use Ring()"
            )

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the mean cost of a round over a period (or over its first rounds if it is long), plus `copies` copies.

        a round that is the exact mean    the cost of `Mean`
        any other round                   messages to k neighbours, and (k + 2)/2 copies of the values
        """
        t, n, wide = self.topology, place.ranks, load.fp32 if self.copies else load
        if n == 1:
            return Cost()
        total, rounds, S = Cost(), rounds_of(t, n), wide.size
        for round in rounds:
            if is_mean(t, n, round) and not self.exchanges:
                total += Mean().cost(wide, place)
            else:
                k = degree(t, n, round)
                apart = place.messages(k, S) + place.copies((k + 2) / 2, S)
                total += (self.joint and place.in_one_kernel("neighbors", k * S, k * S)) or apart
        mean = Cost(*(each / len(rounds) for each in (total.seconds, total.busy, total.sent)))
        return mean + place.copies(self.copies, S)


@dataclass(frozen=True, repr=False)
class NeighborMean(OnGraph):
    """The mean with this round's neighbours:  x_r ← Σ_j w_rj x_j. W is the topology's matrix in this round.

    With weights of ranks, W becomes a matrix that keeps the weighted mean: see `bk.primitives.neighbor_mean_`.
    """

    averages: ClassVar[bool] = True
    keeps: ClassVar[bool] = True
    needs = ("doubly_stochastic",)
    refusal = (
        "{topology} is not doubly stochastic for {n} ranks, so its mean would drift; "
        "use Ring() or OnePeerExact(), or push_sum for a directed graph"
    )

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        return neighbor_mean_(x, self.topology, comm)


@dataclass(frozen=True, repr=False)
class Around(Declared, Stage):
    """A stage with one nested stage, `inner`. `same_on_all_ranks` and `averages` are those of `inner`."""

    inner: Stage
    copies: ClassVar[float] = 0  # of values in fp32 at least, which take as long as its own arithmetic
    keeps: ClassVar[bool] = True
    needs_groups: ClassVar[frozenset[str]] = frozenset()

    @property
    def same_on_all_ranks(self) -> bool:  # type: ignore[override]
        return self.inner.same_on_all_ranks

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return self.inner.averages

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of `inner` with data in fp32 at least, plus `copies` copies (none with one rank)."""
        if place.ranks == 1:
            return self.inner.cost(load, place)
        return self.inner.cost(load.fp32, place) + place.copies(self.copies, load.fp32.size)


@dataclass(frozen=True, repr=False)
class Hierarchical(Around):
    """Average shards within each node, apply `inner` to each rank's shard between nodes, and gather within the node.

        s ← shard of (1/L) Σ x over the L ranks of a node;   s ← inner(s) between nodes;   x ← all s of the node

    With weights of ranks, the mean within a node is weighted, and a node has the sum of its ranks' weights.
    Between nodes, a rank sends 1/L of the bytes of a flat algorithm. The phases of several buckets overlap (`phases`).
    """

    shards: ClassVar[bool] = True
    needs_groups: ClassVar[frozenset[str]] = frozenset({INTRA, INTER})

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(each.needs_shapes for each in self.inner.whole()):
            raise TypeError(f"{self.inner!r} needs the shapes of parameters, and Hierarchical has shards without any")
        if any(isinstance(each, Hierarchical) for each in self.inner.whole()):
            raise TypeError(
                f"{self.inner!r} averages within nodes and between them already, and a shard has no nodes within; use "
                "one Hierarchical, around the stage that averages between nodes"
            )

    def wants_groups(self) -> frozenset[str]:
        return self.needs_groups  # the stage inside sends between nodes

    def check(self, comm: Comm) -> None:
        if not comm.hierarchical:
            raise ValueError(
                f'{self!r} must know the nodes: pass comm=bk.Comm(mesh="hosts"), '
                'or with a DeviceMesh of dimensions ("inter", "intra")'
            )
        self.inner.check(comm.inter)

    def _on(self, comm: Comm) -> Stage:
        return replace(self, inner=self.inner._on(comm.inter))

    def multiple_of(self, comm: Comm) -> int:
        return comm.intra.size * self.inner.multiple_of(comm.inter)

    def init(self, bucket: Bucket, comm: Comm) -> State:
        size, rank = comm.intra.size, comm.intra.rank
        shard = _padded(bucket.flat, size).chunk(size)[rank].clone()
        return {"inner": self.inner.init(Bucket.of(shard), comm.inter)}

    def phases(self, x: Tensor, state: State, comm: Comm) -> Phases:
        intra = comm.intra
        if intra.size == 1:
            return self.inner(x, state["inner"], comm.inter)
        shard = scattered_mean(_padded(x, intra.size), intra)
        yield shard, state["inner"]
        mean = self.inner(shard, state["inner"], comm.inter)
        yield mean, state["inner"]
        fits = x.numel() == intra.size * mean.numel() and x.dtype == mean.dtype and x.is_contiguous()
        whole = compressed_all_gather(mean, None, intra, x if fits else None)
        return x if fits else x.copy_(whole[: x.numel()])

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of scattering and gathering shards in a node, plus the cost of `inner` on a second lane."""
        inside, between = replace(place, part="intra"), replace(place, part="inter")
        L = inside.ranks
        shard = Load(-(-load.values // L), load.value_bytes)
        if L == 1:
            return place.copies(1, load.size) + self.inner.cost(shard, between)
        sent = 2 * (L - 1) * shard.size
        joint = inside.in_one_kernel("shards", load.size, sent)
        within = joint or exchange(inside.link.exchange, 2 * (L - 1), sent)
        beside = self.inner.cost(shard, between)
        return within + place.copies(3, load.size) + replace(beside, beside=beside.seconds, beside_busy=beside.busy)


def _padded(x: Tensor, multiple_of: int) -> Tensor:
    missing = -x.numel() % multiple_of
    return torch.cat([x, x.new_zeros(missing)]) if missing else x


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Around):
    """Error feedback:  y ← c x + β e;  x ← inner(y);  e ← the compression error of inner(y).

    c is `comm.share`, 1 without weights of ranks; the residual e is not weighted again, and fp32 for any dtype of x. A
    result that is not finite is passed on, and e does not change. Each device tests the result itself: it is equal on
    all ranks, so all do the same.

    Args:
        inner: a lossy stage.
        decay: β, from 0 to 1. With 1 nothing is lost in the long run: all sent values and e add up to the sum of x.
            With less than 1, old errors decay; with 0 there is no feedback.

    Raises:
        TypeError: `inner` is not lossy, or is lossy between nodes only.

    Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs", doi:10.21437/Interspeech.2014-274; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes", arXiv:1901.09847; with `decay`, Sarfi et al. 2025, "Communication Efficient LLM
    Pre-training with SparseLoCo", arXiv:2508.15706.
    """

    decay: Annotated[float, Range(0, 1)] = 1.0
    copies: ClassVar[float] = 5
    elementwise: ClassVar[Mapping[str, Carry]] = {"residual": "mean"}

    def __post_init__(self) -> None:
        super().__post_init__()
        inner = self.inner
        if isinstance(inner, Hierarchical) and inner.inner.lossy:
            raise TypeError(
                f"what {inner!r} loses is lost between nodes; say Hierarchical(ErrorFeedback({inner.inner!r}))"
            )
        if not inner.lossy:
            raise TypeError(f"inner is a lossy stage, not {inner!r}, which loses nothing; try CompressedMean()")

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return self.inner(x, state["inner"], comm)
        y, comm = weighed(x, comm)
        inner = partial(self.inner._call_with_check, state=state["inner"], comm=comm)
        return x.copy_(self._feed_back(y, state["residual"], inner))  # nothing, where that is x

    def phases(self, x: Tensor, state: State, comm: Comm) -> Phases:
        if comm.size == 1 or not x.is_cpu or not has_phases(self.inner):
            return self(x, state, comm)
        e, (given, comm) = state["residual"], weighed(x, comm)
        fed = given.add_(e, alpha=self.decay) if given.dtype == e.dtype else torch.add(given, e, alpha=self.decay)
        lost = room_for(e, torch.empty_like)  # a thread's temporaries are for one phase
        y = yield from self.inner.phases(fed, state["inner"], comm, residual=lost)  # type: ignore[call-arg]
        update_if_finite_(e, lost, where=finite(y))
        return x.copy_(y)

    def _feed_back(self, x: Tensor, e: Tensor, inner: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
        """Return inner(x + β e), and set `e` to the compression error if the result is finite. May overwrite `x`.

        `inner(y, residual=…)` returns its result, and whether the result is finite on all ranks.
        """
        with temporaries() as new:
            fed = x.add_(e, alpha=self.decay) if x.dtype == e.dtype else torch.add(x, e, alpha=self.decay)
            lost = room_for(e, new)
            y, ok = inner(fed, residual=lost)
            update_if_finite_(e, lost, where=ok)
            return y
