"""Corrected gossip: each rank keeps a state that removes the bias of plain gossip on non-IID data.

**gradient_tracking.** Each rank tracks the mean gradient of all ranks, for any distribution of the data.

For W the mixing matrix of the round, X the weights of all ranks (a row x_r each), g(X) their gradients g_r(x_r), Q the
tracked gradients q_r, and γ d(·) the step of the optimizer:

    Q ← W Q + g(X) − g(X of the last step)        Q = g(X) in the first step;  Σ_r q_r = Σ_r g_r in every step
    X ← W X − γ d(Q)                              awc
    X ← W (X − γ d(Q))                            atc
    X ← push-sum of X − γ d(Q)                    push_sum: the same on directed graphs (Push-DIGing)

The fixed point is the minimum of the mean loss; on non-IID data plain gossip ends O(γ) away from this minimum.

Nedić, Olshevsky and Shi 2017, "Achieving Geometric Convergence for Distributed Optimization over Time-Varying Graphs"
(DIGing, Push-DIGing), arXiv:1607.03218; Di Lorenzo and Scutari 2016, "NEXT: In-Network Nonconvex Optimization",
arXiv:1602.00591. With momentum in d: Takezawa et al. 2022, "Momentum Tracking: Momentum Acceleration for Decentralized
Deep Learning on Heterogeneous Data", arXiv:2209.15505.

**exact_diffusion.** Exact diffusion reaches the minimum of the mean loss with one exchange of the weights per step.

For X the weights, ψ the weights after the local step, c the correction, W the mixing matrix, and A = (I + W)/2:

    ψ ← X − γ g(X)
    X ← A (ψ + c);   c ← X − ψ             c = 0 at first;  Σ_r c_r stays 0

At the fixed point all ranks have equal weights, c = γ g, and Σ_r g_r = 0. For a_rj the entries of A, the second
line is computed from differences. Two neighbours round their difference to the same magnitude, so Σ_r c_r stays 0:

    y ← ψ + c;   c ← c + Σ_j a_rj (y_j − y);   X ← ψ + c

When γ changes, c is not rescaled. The mean of the weights still moves by γ times the mean gradient, but for some steps
the ranks differ as much as at the earlier γ.

Yuan, Ying, Zhao and Sayed 2017, "Exact Diffusion for Distributed Optimization and Learning", arXiv:1702.05122.

**quasi_global_momentum.** The momentum averages the changes of the mixed weights, not the rank's own gradients.

For X the weights of all ranks, a row each, W the mixing matrix of the round, g the gradients, γ the learning rate, and
m the momentum with the decay ν and the share β in a step:

    X⁺ ← W (X − γ (g + β m));   m ← ν m + (1 − ν) (X − X⁺) / γ
    X⁺ ← W (X − γ (g + β (β m + g)));   m as above                  with Nesterov's momentum

The stage `QuasiGlobalMomentum` computes this after plain SGD, with the velocity v = γ m. When γ changes, v adapts in
about 1/(1 − ν) steps; in the published form, γ m changes at once. On the complete graph, the mean momentum decays by
the factor ν + (1 − ν) β in each step; this is 0.99 if ν and β are 0.9.

Lin, Karimireddy, Stich and Jaggi 2021, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on
Heterogeneous Data", arXiv:2102.04761.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..arguments import Decay, checked
from ..buckets import Bucket
from ..comm import Comm, weighed
from ..keeping import finite, restored, update_if_finite_, wide_copy
from ..lanes import temporaries
from ..primitives import neighbor_mean_
from ..primitives.neighbors import links_in
from ..rules import Algorithm, after_step, during_backward
from ..stages import NeighborMean, OnGraph, State
from ..topology import OnePeerExact, Ring, Topology
from .gossip import decentralized, push_sum


@dataclass(frozen=True, repr=False)
class TrackedGradient(OnGraph):
    """q ← Σ_j w_rj q_j + (c g − the last c g);  q replaces the gradient g;  w_rj are the weights of the graph.

    c is `comm.share`, 1 without weights of ranks.

    A gradient that is not finite is passed on and counts as unchanged, so that Σ q stays the sum of the latest finite
    gradients. In an attachment, the state (q and g) of all ranks then stays as it was.
    """

    keeps: ClassVar[bool] = True
    copies: ClassVar[float] = 7
    elementwise: ClassVar = {"q": "zero", "g": "zero"}  # if the ranks change, Σ q is no longer Σ g
    needs = ("column_stochastic",)
    refusal = "the columns of {topology} do not sum to 1 for {n} ranks, so sums drift; use Ring() or OnePeerExact()"

    def init(self, bucket: Bucket, comm: Comm) -> State:
        return {name: wide_copy(bucket.flat).zero_() for name in ("q", "g")}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return x
        q, before = state["q"], state["g"]
        with temporaries() as new:
            g, comm = weighed(x.to(q.dtype), comm)
            mixed = neighbor_mean_(new(q).copy_(q), self.topology, comm)
            ok = finite(g)
            mixed.add_(torch.where(ok, torch.sub(g, before, out=new(g)), 0.0))
            update_if_finite_(q, mixed, where=finite(mixed))
            update_if_finite_(before, g, where=ok)
            return x.copy_(torch.where(ok, mixed, g))


@checked
def gradient_tracking(topology: Topology | None = None, order: Literal["awc", "atc", "push_sum"] = "awc") -> Algorithm:
    """Train by decentralized SGD that reaches the minimum of the mean loss on non-IID data, too.

    Sends the weights and tracked gradients to each neighbour. Costs memory for two copies of the gradients.
    The optimizer sees the tracked gradient. Use plain SGD, with or without momentum.

    Args:
        topology: as in `decentralized`; for `order="push_sum"` as in `push_sum`. None: `OnePeerExact()`.
        order: the average of the weights, "awc", "atc" or "push_sum"; see the module for the equations.
    """
    chosen = OnePeerExact() if topology is None else topology
    weights = push_sum(chosen) if order == "push_sum" else decentralized(chosen, order)
    return during_backward(TrackedGradient(chosen)) + weights


@dataclass(frozen=True, repr=False)
class ExactDiffusion(OnGraph):
    """X ← A (x + c);  c ← X − x;  x ← X.  c is in fp32 at least; if X is not finite, it is passed on, and c stays."""

    keeps: ClassVar[bool] = True
    copies: ClassVar[float] = 11
    exchanges: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    constant_weights: ClassVar[bool] = True
    elementwise: ClassVar = {"c": "zero"}  # if the ranks change, Σ c is no longer 0
    needs = ("static", "symmetric", "doubly_stochastic")
    refusal = (
        "{stage} corrects by the step before, for which the graph must be static, symmetric and doubly stochastic; "
        "{topology} is not for {n} ranks: use Ring(), or gradient_tracking() on this graph"
    )

    def init(self, bucket: Bucket, comm: Comm) -> State:
        return {"c": wide_copy(bucket.flat).zero_()}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return x
        c = state["c"]
        _, weights, targets = links_in(self.topology, comm)
        with temporaries() as new:
            y, after = torch.add(c, x, out=new(c)), new(c).copy_(c)
            for peer, theirs in comm.exchange(y, weights, targets).items():
                after.add_(theirs.sub_(y), alpha=weights[peer] / 2)
            result = torch.add(after, x, out=y)
            update_if_finite_(c, after, where=finite(result))
            return x.copy_(result)


@checked
def exact_diffusion(topology: Topology = Ring()) -> Algorithm:
    """Train by decentralized SGD that reaches the minimum of the mean loss on non-IID data, too.

    Sends the weights, in fp32 at least, to each neighbour: half the bytes of `gradient_tracking` on the same graph with
    fp32 weights. Costs memory for a copy of the weights. Use plain SGD. Momentum keeps the fixed point; Adam moves it.

    Args:
        topology: static, symmetric and doubly stochastic.
    """
    return after_step(ExactDiffusion(topology))


@dataclass(frozen=True, repr=False)
class QuasiGlobalMomentum(OnGraph):
    """X⁺ ← W (x − β v);  v ← ν v + (1 − ν) (X − X⁺);  x, X ← X⁺,  for x the weights after a local step from X.

    W is the mixing matrix, β is `momentum`, and ν is `decay`. With `nesterov`, the first v is replaced by β v + X − x.
    The state holds X and v, in fp32 at least. If X⁺ is not finite, it is passed on, and the state does not change.
    """

    momentum: Decay = 0.9
    decay: Decay = 0.9
    nesterov: bool = False
    keeps: ClassVar[bool] = True
    copies: ClassVar[float] = 10
    elementwise: ClassVar = {"held": "keep", "velocity": "mean"}
    follows: ClassVar[tuple[str, ...]] = ("held",)
    needs, refusal = NeighborMean.needs, NeighborMean.refusal

    def init(self, bucket: Bucket, comm: Comm) -> State:
        held = wide_copy(bucket.flat)
        return {"held": held, "velocity": torch.zeros_like(held)}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        held, v = state["held"], state["velocity"]
        with temporaries() as new:
            now, ahead, moved = restored(x, held), v, new(held)
            if self.nesterov:
                ahead = torch.sub(held, now, out=moved).add_(v, alpha=self.momentum)
            mixed = neighbor_mean_(torch.sub(now, ahead, alpha=self.momentum, out=new(held)), self.topology, comm)
            ok = finite(mixed)
            torch.sub(held, mixed, out=moved).mul_(1 - self.decay).add_(v, alpha=self.decay)
            update_if_finite_(v, moved, where=ok)
            update_if_finite_(held, mixed, where=ok)
            return x.copy_(mixed)


@checked
def quasi_global_momentum(
    topology: Topology | None = None, momentum: float = 0.9, decay: float = 0.9, nesterov: bool = False
) -> Algorithm:
    """Train by decentralized SGD with a momentum that stays similar on all ranks even if their data are non-IID.

    Use SGD without momentum. Sends the weights, in fp32 at least, to each neighbour. Costs two copies of the weights.

    Args:
        topology: doubly stochastic, as in `decentralized`. None: `OnePeerExact()`.
        momentum: β, the share of the momentum in a step, from 0 to below 1; with 0, this is `decentralized` (ATC).
        decay: ν, the decay of the momentum, from 0 to below 1.
        nesterov: use Nesterov's momentum, which was best in the paper.
    """
    chosen = OnePeerExact() if topology is None else topology
    return after_step(QuasiGlobalMomentum(chosen, momentum, decay, nesterov))
