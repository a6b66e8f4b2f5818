"""Stages around another stage."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import check_fields, real
from ..buckets import Bucket
from ..comm import INTER, INTRA, Comm
from ..costs import Cost, Load, Place, all_gather, exchange
from ..keeping import finite, room_for, update_if_finite_
from ..lanes import Phases, temporaries
from .base import Carry, Stage, State, cost


@dataclass(frozen=True, repr=False)
class Around(Stage):
    """A stage that agrees and averages if the stage in it does."""

    inner: Stage
    keeps: ClassVar[bool] = True
    needs_groups: ClassVar[frozenset[str]] = frozenset()

    @property
    def same_on_all_ranks(self) -> bool:  # type: ignore[override]
        return self.inner.same_on_all_ranks

    @property
    def averages(self) -> bool:  # type: ignore[override]
        return self.inner.averages


@dataclass(frozen=True, repr=False)
class Hierarchical(Around):
    """The average within each node, `inner` between nodes on each rank's own shard, and a gather within the node.

        s ← shard of (1/L) Σ x over the L ranks of a node;   s ← inner(s) between nodes;   x ← all s of the node

    Every rank sends 1/L of what a flat algorithm would send between nodes. An attachment overlaps what is sent between
    nodes with what other buckets send within them: see `phases`.
    """

    shards: ClassVar[bool] = True
    needs_groups: ClassVar[frozenset[str]] = frozenset({INTRA, INTER})

    def __post_init__(self) -> None:
        check_fields(self)
        if self.inner.wants_shapes():
            raise TypeError(
                f"{self.inner!r} needs the shapes of the parameters, and Hierarchical gives it shards without any"
            )
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
        shard = intra.reduce_scatter(_padded(x.mul_(1 / intra.size), intra.size))
        yield shard, state["inner"]
        mean = self.inner(shard, state["inner"], comm.inter)
        yield mean, state["inner"]
        return x.copy_(intra.all_gather(mean)[: x.numel()])

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of S/L scattered and gathered in a node of L ranks, and beside of `inner` on S/L."""
        inside, between = replace(place, part="intra"), replace(place, part="inter")
        L = inside.ranks
        shard = Load(-(-load.values // L), load.value_bytes)
        if L == 1:
            return place.copies(1, load.size) + cost(self.inner, shard, between)
        line, b = inside.link.exchange, shard.size
        within = exchange(line, 2 * all_gather(line, L, b), 2 * (L - 1) * b)
        return within + place.copies(3, load.size) + cost(self.inner, shard, between).put_beside()


def _padded(x: Tensor, multiple_of: int) -> Tensor:
    missing = -x.numel() % multiple_of
    return torch.cat([x, x.new_zeros(missing)]) if missing else x


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Around):
    """Error feedback:  y ← x + β e;  x ← inner(y);  e ← the compression error of inner(y).

    The residual e is fp32 for any dtype of x. A result that is not finite is passed on, and e is kept; the device
    decides from the result, which is equal on all ranks.

    Args:
        inner: a lossy stage.
        decay: β, from 0 to 1. With 1 nothing is lost in the long run: what was sent and e add up to all x. With less,
            errors are forgotten, as old momentum is; with 0 they are not fed back.

    Raises:
        TypeError: `inner` loses nothing, or loses it between nodes only.
        ValueError: `decay` is not from 0 to 1.

    Seide et al. 2014, "1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of
    Speech DNNs", doi:10.21437/Interspeech.2014-274; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other
    Gradient Compression Schemes", arXiv:1901.09847; with `decay`, Sarfi et al. 2025, "Communication Efficient LLM
    Pre-training with SparseLoCo", arXiv:2508.15706.
    """

    decay: float = 1.0
    elementwise: ClassVar[Mapping[str, Carry]] = {"residual": "mean"}

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "decay", real("decay", self.decay, 0, 1))
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
            fed = x.add_(e, alpha=self.decay) if x.dtype == e.dtype else torch.add(x, e, alpha=self.decay)
            lost = room_for(e, new)
            y = self.inner(fed, state["inner"], comm, residual=lost)  # type: ignore[call-arg]
            update_if_finite_(e, lost, where=finite(y))
            return x.copy_(y)  # nothing, where that is x

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of `inner` in fp32 and of 5 copies."""
        if place.ranks == 1:
            return cost(self.inner, load, place)
        return cost(self.inner, load.fp32, place) + place.copies(5, load.fp32.size)
