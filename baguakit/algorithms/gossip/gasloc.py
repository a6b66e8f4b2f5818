"""GASLoC: local steps, then an accelerated gossip step, whose outer momentum is inside the mixing.

For θ_r the weights of rank r after an exchange, x_r those after H local steps from θ_r, W the mixing matrix, η the
outer learning rate and μ the outer momentum:

    y ← θ + η (x − θ)
    θ ← W (y + μ (y − y before)),   x ← θ        y before = θ in the first round

On the complete graph, W = 11ᵀ/n, all ranks agree, and this is DiLoCo: `diloco(H, lr=η, momentum=μ, nesterov=True)`.
With η = 1 and μ = 0 it is decentralized local SGD, x ← W x after every H-th step.

A second-hand account of the paper has the momentum outside, θ ← W y + μ (y − y before). Then ranks do not agree on the
complete graph, where the paper claims DiLoCo; so this is the form with that property. It sends the same.

Without gradients a disagreement in the direction of an eigenvalue λ of a symmetric W grows unless λ > −1/(1 + 2μ). That
holds on a ring for any μ < 1, but with μ = 0.9 not on every graph, and for few numbers of ranks with one peer a round.
`attach` computes by what factor a round multiplies it, and refuses a graph on which it grows.

Cagnasso, Belilovsky and Oyallon 2026, "Unifying Local Communications and Local Updates for LLM Pretraining",
arXiv:2606.11081.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ...arguments import check_fields, checked, real
from ...buckets import Bucket
from ...comm import Comm
from ...costs import Cost, Load, Place
from ...keeping import finite, keep_, restored, wide_copy
from ...lanes import temporaries
from ...primitives import neighbor_mean_
from ...rules import Rule, after_step
from ...stages import NeighborMean, Stage, State
from ...topology import Ring, Topology

ROUNDS = 128  # in which it is seen whether disagreement grows


@dataclass(frozen=True, repr=False)
class OuterGossip(Stage):
    """y ← θ + η (x − θ);  θ ← W (y + μ (y − y before));  x ← θ,  for η = `lr` and μ = `momentum`.

    The state holds θ and c = y before − θ, in fp32 at least. A θ that is not finite is passed on and not kept.
    """

    topology: Topology
    lr: float = 0.7
    momentum: float = 0.9

    keeps: ClassVar[bool] = True
    elementwise: ClassVar = {"theta": "keep", "c": "mean"}
    follows: ClassVar[tuple[str, ...]] = ("theta",)

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "lr", real("lr", self.lr, above=0))
        object.__setattr__(self, "momentum", real("momentum", self.momentum, 0, below=1))

    def check(self, comm: Comm) -> None:
        t, n, mu = self.topology, comm.size, self.momentum
        NeighborMean(t).check(comm)
        if n > 1 and mu > 0 and (grows := growth(t, mu, n)) > 1.001:
            raise ValueError(
                f"momentum={mu} multiplies the disagreement of {n} ranks by {grows:.2f} in each round of {t!r}; "
                "use less momentum, or Ring(), which takes any below 1"
            )

    def init(self, bucket: Bucket, comm: Comm) -> State:
        theta = wide_copy(bucket.flat)
        return {"theta": theta, "c": torch.zeros_like(theta)}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        theta, c = state["theta"], state["c"]
        with temporaries() as new:
            now = restored(x, theta)
            ahead = torch.sub(theta, now, out=new(theta))
            y = torch.add(now, ahead, alpha=1 - self.lr, out=new(theta))  # x to the bit for η = 1
            torch.sub(y, theta, out=ahead).sub_(c)  # y − y before
            mixed = neighbor_mean_(torch.add(y, ahead, alpha=self.momentum, out=ahead), self.topology, comm)
            ok = finite(mixed)
            keep_(c, y.sub_(mixed), where=ok)
            keep_(theta, mixed, where=ok)
            return x.copy_(mixed)

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of `NeighborMean` in fp32 at least and of 13 copies."""
        wide = load.at_least_fp32
        return NeighborMean(self.topology).cost(wide, place) + place.copies(13, wide.size)


def growth(topology: Topology, momentum: float, size: int) -> float:
    """Return the factor by which a round multiplies a disagreement of ranks at rest:  d ← W (d + μ (d − d before)).

    It is the mean of the last rounds of a power iteration: the spectral radius, if there is one matrix.
    """
    period = min(topology.period(size), ROUNDS)
    matrices = [topology.matrix(size, round) for round in range(period)]
    d, before = np.random.default_rng(0).normal(size=(2, size))
    logarithms = []
    for round in range(ROUNDS):
        d, before = matrices[round % period] @ (d + momentum * (d - before)), d
        d, before = d - d.mean(), before - before.mean()
        length = float(np.hypot(np.linalg.norm(d), np.linalg.norm(before)))
        if length < 1e-12:  # the exact mean: all that is left is rounding
            return 0.0
        d, before = d / length, before / length
        logarithms.append(np.log(length))
    return float(np.exp(np.mean(logarithms[ROUNDS // 2 :])))


@checked
def gasloc(topology: Topology = Ring(), every: int = 500, lr: float = 0.7, momentum: float = 0.9) -> Rule:
    """Train alone for `every` steps, then mix the outer Nesterov step of each rank with those of its neighbours.

    Sends the size of the weights, in fp32 at least, to each neighbour, divided by `every`, a step. Costs two copies of
    the weights. Weights differ between ranks; `att.merge()` averages them.

    Args:
        topology: doubly stochastic. `Ring()` takes any momentum below 1; with one peer a round, such as
            `OnePeerExact()`, begin at 0.3.
        every: H, the number of local steps.
        lr: η, the outer learning rate. The defaults of `lr` and `momentum` are those of DiLoCo.
        momentum: μ, the outer momentum, from 0 to below 1.

    Raises:
        TypeError: `topology` is not a topology, or a number none.
        ValueError: a number is impossible; from `attach`, the matrices are not doubly stochastic for as many ranks, or
            disagreements grow on this graph with this momentum.
    """
    return after_step(OuterGossip(topology, lr, momentum), every=every)
