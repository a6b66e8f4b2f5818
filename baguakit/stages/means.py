"""Stages that average."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..arguments import check_fields
from ..comm import Comm
from ..compressors import Compressor, MinMaxUInt8
from ..compressors.base import check_dense
from ..costs import (
    Cost,
    Load,
    Place,
    all_gather,
    all_reduce,
    degree,
    exchange,
    neighbors,
    ring,
    rounds_of,
)
from ..primitives import compressed_mean_, mean_, neighbor_mean_, sparse_mean_
from ..primitives.compressed import in_one_hop, pays, pieces_of
from ..primitives.neighbors import is_mean
from ..topology import Topology
from .base import Stage, State


@dataclass(frozen=True, repr=False)
class Average(Stage):
    """A stage whose result is an average of `x`, equal on all ranks."""

    same_on_all_ranks: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    keeps: ClassVar[bool] = True


@dataclass(frozen=True, repr=False)
class Mean(Average):
    """The exact mean over all ranks:  x ← (1/n) Σ_r x_r."""

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        return mean_(x, comm)

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost: w = all-reduce of S;  q = a copy."""
        if place.ranks == 1:
            return Cost()
        n, S, line = place.ranks, load.size, place.link.all_reduce
        return place.copies(1, S) + exchange(line, all_reduce(line, n, S), ring(n) * S)


@dataclass(frozen=True, repr=False)
class CompressedMean(Average):
    """The mean over all ranks of compressed values, compressed again:  x ← Q((1/n) Σ_r Q(x_r)).

    Q(x) is x compressed and decompressed by `compressor`. Small buckets are compressed once.
    """

    compressor: Compressor = MinMaxUInt8()
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_dense("compressor", self.compressor)

    def multiple_of(self, comm: Comm) -> int:
        return 64 * comm.size

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        return compressed_mean_(x, self.compressor, comm, residual=residual)

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of codes, or of `Mean` if codes are no shorter than the values.

        one hop     w = row(N) to each of the others             q = N (compress + n decompress)             P = 1
        two hops    w = row(N/n), scattered and gathered         q = N (compress + reduce + decompress)      P ≤ 8
        """
        n, N, c = place.ranks, load.values, self.compressor
        if n == 1 or not pays(N, load.value_bytes, c, n):
            return Mean().cost(load, place)
        line, speed = place.link.to_all, place.network.codec(c)
        if in_one_hop(N, c, n):
            b, q = c.row_bytes(N), N * (speed.compress + n * speed.decompress)
            return exchange(line, neighbors(line, n - 1, b), (n - 1) * b, q)
        b, q = c.row_bytes(-(-N // n)), N * (speed.compress + speed.reduce + speed.decompress)
        return place.shards(b, q, pieces_of(N, place.gpu))


@dataclass(frozen=True, repr=False)
class SparseMean(Average):
    """The mean over all ranks of the entries that a sparse compressor keeps of each:  x ← (1/n) Σ_r keep(x_r)."""

    compressor: Compressor
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        return sparse_mean_(x, self.compressor, comm, residual=residual)

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost: w = all-gather of row(N);  q = N (compress + n add)."""
        n, N, c = place.ranks, load.values, self.compressor
        if n == 1:
            return Cost()
        line, speed, b = place.link.exchange, place.network.codec(c), c.row_bytes(N)
        return exchange(line, all_gather(line, n, b), (n - 1) * b, N * (speed.compress + n * speed.reduce))


@dataclass(frozen=True, repr=False)
class NeighborMean(Stage):
    """The mean with this round's neighbours:  x ← Σ_j w_rj x_j, for W the topology's matrix of the round."""

    topology: Topology
    averages: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, comm: Comm) -> None:
        self.topology.check(comm.size)
        if not self.topology.doubly_stochastic(comm.size):
            raise ValueError(
                f"{self.topology!r} is not doubly stochastic for {comm.size} ranks, so its mean would drift; "
                "use Ring() or OnePeerExact(), or push_sum for a directed graph"
            )

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        return neighbor_mean_(x, self.topology, comm)

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the mean over the rounds of a period, of a long one over the first.

        exact mean     the cost of `Mean`
        else           w = S to each of k neighbours;  q = (k + 2)/2 copies
        """
        t, n, S = self.topology, place.ranks, load.size
        if n == 1:
            return Cost()
        total, rounds = Cost(), rounds_of(t, n)
        for round in rounds:
            if is_mean(t, n, round):
                total += Mean().cost(load, place)
            else:
                k = degree(t, n, round)
                total += place.messages(k, S) + place.copies((k + 2) / 2, S)
        return Cost(*(each / len(rounds) for each in (total.seconds, total.busy, total.sent)))
