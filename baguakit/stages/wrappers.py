"""Stages around another stage."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import check_fields
from ..buckets import Bucket
from ..comm import INTER, INTRA, Comm
from ..keeping import finite, keep_
from ..lanes import temporaries
from .base import Carry, Stage, State


@dataclass(frozen=True, repr=False)
class Around(Stage):
    """A stage that agrees and averages if the stage in it does."""

    inner: Stage
    keeps: ClassVar[bool] = True
    needs_groups: ClassVar[frozenset[str]] = frozenset()

    @property
    def agrees(self) -> bool:  # type: ignore[override]
        """As the stage inside."""
        return self.inner.agrees

    @property
    def averages(self) -> bool:  # type: ignore[override]
        """As the stage inside."""
        return self.inner.averages


@dataclass(frozen=True, repr=False)
class Hierarchical(Around):
    """Average within each node; run `inner` between the nodes, each rank on its own shard; gather within the node.

        s ← shard of (1/L) Σ x over the L ranks of a node;   s ← inner(s) between nodes;   x ← all s of the node

    Every rank sends 1/L of what a flat algorithm would send between nodes.
    """

    shards: ClassVar[bool] = True
    needs_groups: ClassVar[frozenset[str]] = frozenset({INTRA, INTER})

    def __post_init__(self) -> None:
        check_fields(self)
        if self.inner.wants_shapes():
            raise TypeError(
                f"{self.inner!r} needs the shapes of the parameters, and Hierarchical gives it shards without any"
            )

    def wants_groups(self) -> frozenset[str]:
        return self.needs_groups  # the stage inside sends between nodes

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
class ErrorFeedback(Around):
    """Add to each flight what `inner` lost in the one before:  y ← x + e;  x ← inner(y);  e ← what that lost of y.

    Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847. The residual e is fp32 whatever x is. A flight with a
    value that is not finite passes it on and leaves e as it was, decided on the device from the result, which is the
    same on all ranks.
    """

    elementwise: ClassVar[Mapping[str, Carry]] = {"residual": "mean"}

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.inner, Hierarchical) and self.inner.inner.lossy:
            raise TypeError(
                f"what {self.inner!r} loses is lost between nodes; "
                f"say Hierarchical(ErrorFeedback({self.inner.inner!r}))"
            )
        if not self.inner.lossy:
            raise TypeError(
                f"ErrorFeedback feeds back what a stage loses, and {self.inner!r} loses nothing; try CompressedMean()"
            )

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
