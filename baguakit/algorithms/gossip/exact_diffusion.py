"""Exact diffusion and D²: gossip that ends at the minimum of the mean loss, for one exchange of the weights a step.

For ψ the weights after the local step, W the mixing matrix, and A = (I + W)/2 for exact diffusion, A = W for D²:

    ψ ← X − γ g(X)
    X ← A (ψ + c);   c ← X − ψ             c = 0 at first;  Σ_r c_r stays 0

Since c = X − X before + γ g before, D² is its published form, X ← W (2X − X before − γ g + γ g before). On the complete
graph it is SGD with the mean gradient. At the fixed point all ranks agree, c = γ g, and Σ_r g_r = 0: the minimum of the
mean loss, on non-IID data, too, from which plain gossip ends O(γ) away.

**Rounding.** The two lines above are computed as differences, which a rank and its neighbour round alike:

    y ← ψ + c;   c ← c + Σ_j a_rj (y_j − y);   X ← ψ + c

Written as above, each step rounds as X does, in most graphs to one side, and c adds it up: with weights of 1/3 in fp32,
Σ_r c_r would pull the mean away from the minimum for ever.

**Learning rates.** c is not rescaled when γ changes. The mean over ranks follows the mean of the gradients under any
schedule, because Σ_r c_r = 0. How each rank departs from the mean is as it was at the earlier γ, for as many rounds as
the graph needs to mix: after a drop to a tenth, ranks disagree as with the γ before the drop, and then less.

Yuan, Ying, Zhao and Sayed 2017, "Exact Diffusion for Distributed Optimization and Learning", arXiv:1702.05122;
Tang, Lian, Yan, Zhang and Liu 2018, "D²: Decentralized Training over Decentralized Data", arXiv:1803.07068.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ...arguments import check_fields, checked, truth
from ...buckets import Bucket
from ...comm import Comm
from ...costs import Cost, Load, Place, degree
from ...keeping import finite, update_if_finite_
from ...lanes import temporaries
from ...primitives.neighbors import links
from ...rules import Rule, after_step
from ...stages import Stage, State
from ...topology import Ring, Topology


@dataclass(frozen=True, repr=False)
class ExactDiffusion(Stage):
    """X ← A (x + c);  c ← X − x;  x ← X,  for x the weights after a local step; A = (I + W)/2 if `lazy`, else W.

    c is fp32 at least. An X that is not finite is passed on, and c is kept.
    """

    topology: Topology
    lazy: bool = True

    keeps: ClassVar[bool] = True
    elementwise: ClassVar = {"c": "zero"}  # with other ranks Σ c would not be 0

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "lazy", truth("lazy", self.lazy))

    def check(self, comm: Comm) -> None:
        t, n = self.topology, comm.size
        if not (t.static(n) and t.symmetric(n) and t.doubly_stochastic(n)):
            raise ValueError(
                f"{self!r} corrects by the step before, for which the graph must be static, symmetric and doubly "
                f"stochastic; {t!r} is not for {n} ranks: use Ring(), or gradient_tracking() on this graph"
            )
        if not self.lazy and (least := float(np.linalg.eigvalsh(t.matrix(n, 0))[0])) <= -1 / 3 + 1e-9:
            raise ValueError(
                f"the least eigenvalue of {t!r} is {least:.3f} for {n} ranks, and {self!r} converges if it is more "
                "than -1/3; use lazy=True"
            )

    def init(self, bucket: Bucket, comm: Comm) -> State:
        dtype = torch.promote_types(bucket.flat.dtype, torch.float32)
        return {"c": torch.zeros_like(bucket.flat, dtype=dtype)}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return x
        c, share = state["c"], 0.5 if self.lazy else 1.0
        weights, targets = links(self.topology, comm.rank, comm.size, 0)
        with temporaries() as new:
            y, after = torch.add(c, x, out=new(c)), new(c).copy_(c)
            received = comm.exchange(y, [peer for peer in weights if peer != comm.rank], targets)
            for peer, theirs in received.items():
                after.add_(theirs.sub_(y), alpha=share * weights[peer])
            result = torch.add(after, x, out=y)
            update_if_finite_(c, after, where=finite(result))
            return x.copy_(result)

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost: w = S in fp32 at least to each of k neighbours;  q = 7 + 3 k copies."""
        if place.ranks == 1:
            return Cost()
        S, k = load.at_least_fp32.size, degree(self.topology, place.ranks)
        return place.messages(k, S) + place.copies(7 + 3 * k, S)


@checked
def exact_diffusion(topology: Topology = Ring(), lazy: bool = True) -> Rule:
    """Train by decentralized SGD that reaches the minimum of the mean loss on non-IID data, too, for half the bytes.

    Half of `gradient_tracking`: it sends the size of the weights, in fp32 at least, to each neighbour, and costs one
    copy of the weights. Give it a plain SGD; heavy-ball momentum ends at the same point, Adam elsewhere. Weights differ
    between ranks; `att.merge()` averages them.

    Args:
        topology: static, symmetric and doubly stochastic.
        lazy: mix by (I + W)/2, which is exact diffusion, on any such graph. False: by W, which is D², faster where the
            least eigenvalue of W is more than −1/3.

    Raises:
        TypeError: `topology` is not a topology, or `lazy` neither True nor False.
        ValueError: from `attach`, the topology does not fit for as many ranks.
    """
    return after_step(ExactDiffusion(topology, lazy))
