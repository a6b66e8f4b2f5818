"""Gradient tracking: each rank tracks the mean gradient of all ranks, for any distribution of the data.

For W the mixing matrix of the round and g_r(x_r) the gradient of rank r at its own weights:

    Q ← W Q + g(X) − g(X before)                  Q = g(X) in the first step;  Σ_r q_r = Σ_r g_r in every step
    X ← W X − γ d(Q)                              awc
    X ← W (X − γ d(Q))                            atc
    X ← push-sum of X − γ d(Q)                    push_sum: the same on directed graphs (Push-DIGing)

The fixed point is the minimum of the mean loss; on non-IID data plain gossip ends O(γ) away from it.

Nedić, Olshevsky and Shi 2017, "Achieving Geometric Convergence for Distributed Optimization over Time-Varying Graphs"
(DIGing, Push-DIGing), arXiv:1607.03218; Di Lorenzo and Scutari 2016, "NEXT: In-Network Nonconvex Optimization",
arXiv:1602.00591. With momentum in d: Takezawa et al. 2022, "Momentum Tracking: Momentum Acceleration for Decentralized
Deep Learning on Heterogeneous Data", arXiv:2209.15505.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ...arguments import check_fields, checked
from ...buckets import Bucket
from ...comm import Comm
from ...costs import Cost, Load, Place
from ...keeping import finite, update_if_finite_
from ...lanes import temporaries
from ...primitives import neighbor_mean_
from ...rules import Algorithm, during_backward
from ...stages import NeighborMean, Stage, State
from ...topology import OnePeerExact, Topology
from .decentralized import decentralized
from .push_sum import push_sum


@dataclass(frozen=True, repr=False)
class TrackedGradient(Stage):
    """q ← Σ_j w_rj q_j + g − g before;  q is put where the gradient was.

    A gradient that is not finite is passed on. Attached, all ranks then keep their q and g. By hand, only one rank
    knows of it, and its gradient counts as unchanged: the q are mixed, and Σ q stays the sum of the latest finite
    gradients.
    """

    topology: Topology
    keeps: ClassVar[bool] = True
    elementwise: ClassVar = {"q": "zero", "g": "zero"}  # with other ranks Σ q would not be Σ g

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, comm: Comm) -> None:
        if not self.topology.column_stochastic(comm.size):
            raise ValueError(
                f"the columns of {self.topology!r} do not sum to 1 for {comm.size} ranks, so that sums would drift; "
                "use Ring() or OnePeerExact()"
            )

    def init(self, bucket: Bucket, comm: Comm) -> State:
        dtype = torch.promote_types(bucket.flat.dtype, torch.float32)
        return {name: torch.zeros_like(bucket.flat, dtype=dtype) for name in ("q", "g")}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return x
        q, before = state["q"], state["g"]
        with temporaries() as new:
            g, mixed = x.to(q.dtype), neighbor_mean_(new(q).copy_(q), self.topology, comm)
            ok = finite(g)
            mixed.add_(torch.where(ok, torch.sub(g, before, out=new(g)), 0.0))
            update_if_finite_(q, mixed, where=finite(mixed))
            update_if_finite_(before, g, where=ok)
            return x.copy_(torch.where(ok, mixed, g))

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of `NeighborMean` in fp32 at least and of 7 copies."""
        wide = load.at_least_fp32
        return NeighborMean(self.topology).cost(wide, place) + place.copies(7, wide.size)


@checked
def gradient_tracking(topology: Topology | None = None, order: Literal["awc", "atc", "push_sum"] = "awc") -> Algorithm:
    """Train by decentralized SGD that reaches the minimum of the mean loss on non-IID data, too.

    Sends the size of the weights and the size of the gradients to each neighbour; costs two copies of the gradients.
    The optimizer sees the tracked gradient. Give it a plain SGD, with momentum if wanted.

    Args:
        topology: doubly stochastic, as in `decentralized`; for `order="push_sum"` column-stochastic, such as
            `FromDigraph(…)`. None: `OnePeerExact()`.
        order: the average of the weights, "awc", "atc" or "push_sum"; the equations are those of the module.

    Raises:
        ValueError: there is no such `order`; from `attach`, the matrices do not fit it for as many ranks.
        TypeError: `topology` is not a topology.
    """
    chosen = OnePeerExact() if topology is None else topology
    weights = push_sum(chosen) if order == "push_sum" else decentralized(chosen, order)
    return during_backward(TrackedGradient(chosen)), weights
