"""Stages that average."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..arguments import check_fields
from ..comm import Comm
from ..compressors import Compressor, MinMaxUInt8
from ..compressors.base import check_dense
from ..primitives import compressed_mean_, mean_, neighbor_mean_, sparse_mean_
from ..topology import Topology
from .base import Stage, State


@dataclass(frozen=True, repr=False)
class Mean(Stage):
    """The exact mean over all ranks:  x ← (1/n) Σ_r x_r."""

    agrees: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

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
    averages: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_dense("compressor", self.compressor)

    def multiple_of(self, comm: Comm) -> int:
        return 64 * comm.size

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        return compressed_mean_(x, self.compressor, comm, residual=residual)  # type: ignore[no-any-return]


@dataclass(frozen=True, repr=False)
class SparseMean(Stage):
    """The mean over all ranks of what a sparse compressor keeps of each:  x ← (1/n) Σ_r keep(x_r)."""

    compressor: Compressor
    lossy: ClassVar[bool] = True
    agrees: ClassVar[bool] = True
    averages: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(self, x: Tensor, state: State, comm: Comm, residual: Tensor | None = None) -> Tensor:
        return sparse_mean_(x, self.compressor, comm, residual=residual)  # type: ignore[no-any-return]


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
        return neighbor_mean_(x, self.topology, comm)  # type: ignore[no-any-return]
