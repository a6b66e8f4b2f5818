"""Quasi-global momentum: gossip whose momentum follows the way of the mixed weights, not the rank's own gradients.

For X the weights of all ranks, a row each, W the mixing matrix of the round, g the gradients and γ the learning rate:

    X⁺ ← W (X − γ (g + β m));   m ← ν m + (1 − ν) (X − X⁺) / γ
    X⁺ ← W (X − γ (g + β (β m + g)));   the same m                  with Nesterov's momentum

The momentum is kept as a velocity, γ m, in the units of the weights. So one stage behind plain SGD does it, without γ:
for x = X − γ g the weights after the local step,

    X⁺ ← W (x − β v), or W (x − β (β v + X − x));   v ← ν v + (1 − ν) (X − X⁺);   x ← X⁺

This is the same for a constant γ. When γ changes, the velocity goes on as it was and adapts in about 1/(1 − ν) steps;
the published form would scale it at once. On the complete graph the mean of the momentum has the factor ν + (1 − ν) β:
0.99 for 0.9 and 0.9, not 0.9.

Lin, Karimireddy, Stich and Jaggi 2021, "Quasi-Global Momentum: Accelerating Decentralized Deep Learning on
Heterogeneous Data", arXiv:2102.04761.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...arguments import check_fields, checked, real, truth
from ...buckets import Bucket
from ...comm import Comm
from ...costs import Cost, Load, Place
from ...keeping import finite, restored, update_if_finite_, wide_copy
from ...lanes import temporaries
from ...primitives import neighbor_mean_
from ...rules import Rule, after_step
from ...stages import NeighborMean, Stage, State
from ...topology import OnePeerExact, Topology


@dataclass(frozen=True, repr=False)
class QuasiGlobalMomentum(Stage):
    """X⁺ ← W (x − β v);  v ← ν v + (1 − ν) (X − X⁺);  x, X ← X⁺,  for x the weights after a local step from X.

    With `nesterov`, β v + X − x in place of v. The state holds X and v, in fp32 at least; β is `momentum`, ν is
    `decay`. An X⁺ that is not finite is passed on and not kept.
    """

    topology: Topology
    momentum: float = 0.9
    decay: float = 0.9
    nesterov: bool = False

    keeps: ClassVar[bool] = True
    elementwise: ClassVar = {"held": "keep", "velocity": "mean"}
    follows: ClassVar[tuple[str, ...]] = ("held",)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("momentum", "decay"):
            object.__setattr__(self, name, real(name, getattr(self, name), 0, below=1))
        object.__setattr__(self, "nesterov", truth("nesterov", self.nesterov))

    def check(self, comm: Comm) -> None:
        NeighborMean(self.topology).check(comm)

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

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of `NeighborMean` in fp32 at least and of 10 copies."""
        wide = load.at_least_fp32
        return NeighborMean(self.topology).cost(wide, place) + place.copies(10, wide.size)


@checked
def quasi_global_momentum(
    topology: Topology | None = None, momentum: float = 0.9, decay: float = 0.9, nesterov: bool = False
) -> Rule:
    """Train by decentralized SGD with a momentum that non-IID data do not pull apart.

    Give it a plain SGD, without momentum. Sends the size of the weights, in fp32 at least, to each neighbour; costs two
    copies of the weights. Weights differ between ranks; `att.merge()` averages them.

    Args:
        topology: doubly stochastic, as in `decentralized`. None: `OnePeerExact()`.
        momentum: β, the share of the momentum in a step, from 0 to below 1; 0 is ATC.
        decay: ν, of the momentum itself, from 0 to below 1.
        nesterov: step by Nesterov's momentum, which the paper found best.

    Raises:
        TypeError: `topology` is not a topology, or an argument of another type.
        ValueError: a number is impossible; from `attach`, the matrices are not doubly stochastic for as many ranks.
    """
    chosen = OnePeerExact() if topology is None else topology
    return after_step(QuasiGlobalMomentum(chosen, momentum, decay, nesterov))
