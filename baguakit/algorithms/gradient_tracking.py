"""Gradient tracking: each rank follows the mean gradient of all ranks, whatever data it has itself.

For W the mixing matrix of the round and g_r(x_r) the gradient of rank r at its own weights:

    Q ← W Q + g(X) − g(X before)                  Q = g(X) in the first step;  Σ_r q_r = Σ_r g_r in every step
    X ← W X − γ d(Q)                              awc
    X ← W (X − γ d(Q))                            atc
    X ← push-sum of X − γ d(Q)                    push_sum: the same on directed graphs (Push-DIGing)

So the fixed point is the minimum of the mean loss, where plain gossip stops O(γ) short of it on unlike data.

Nedić, Olshevsky and Shi 2017 (DIGing, Push-DIGing), arXiv:1607.03218; Di Lorenzo and Scutari 2016,
arXiv:1602.00591. With momentum in d: Takezawa et al. 2022, arXiv:2209.15505.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..arguments import check_fields, checked
from ..buckets import Bucket
from ..comm import Comm
from ..keeping import finite, keep_
from ..lanes import temporaries
from ..primitives import neighbor_mean_
from ..rules import Algorithm, during_backward
from ..stages import Stage, State
from ..topology import OnePeerExact, Topology
from .decentralized import decentralized
from .push_sum import push_sum


@dataclass(frozen=True, repr=False)
class TrackedGradient(Stage):
    """q ← Σ_j w_rj q_j + g − g before;  q is put where the gradient was.

    A gradient that is not finite is passed on. Attached, all ranks then keep q and g as they were. By hand, where only
    the rank that has it knows, it counts as unchanged: the q are mixed, and Σ q stays the sum of the latest finite
    gradients.
    """

    topology: Topology
    keeps: ClassVar[bool] = True
    elementwise: ClassVar = {"q": "zero", "g": "zero"}  # over other ranks Σ q would no more be Σ g

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, comm: Comm) -> None:
        self.topology.check(comm.size)
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
            whole = finite(g)
            mixed.add_(torch.where(whole, torch.sub(g, before, out=new(g)), 0.0))
            keep_(q, mixed, where=finite(mixed))
            keep_(before, g, where=whole)
            return x.copy_(torch.where(whole, mixed, g))


@checked
def gradient_tracking(topology: Topology | None = None, order: Literal["awc", "atc", "push_sum"] = "awc") -> Algorithm:
    """Decentralized SGD that reaches the minimum of the mean loss, however unlike the ranks' data are.

    Sends the size of the weights and the size of the gradients to each neighbour; costs two copies of the gradients.
    The optimizer sees the tracked gradient. Give it a plain SGD, with momentum if wanted.

    Args:
        topology: doubly stochastic, as in `decentralized`; for `order="push_sum"` column-stochastic, such as
            `FromDigraph(…)`. None: `OnePeerExact()`.
        order: how the weights are averaged: "awc", "atc" or "push_sum", the equations are those of the module.

    Raises:
        ValueError: there is no such `order`; from `attach`, the matrices do not fit it for as many ranks.
        TypeError: `topology` is not a topology.
    """
    chosen = OnePeerExact() if topology is None else topology
    weights = push_sum(chosen) if order == "push_sum" else decentralized(chosen, order)
    return during_backward(TrackedGradient(chosen)), weights
