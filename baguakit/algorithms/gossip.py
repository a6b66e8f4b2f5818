"""Gossip: ranks average their weights with a few neighbours in each step.

**decentralized.** Decentralized SGD: each rank averages its own weights x_r with the weights of a few other ranks.

For X the weights of all ranks, a row each, W the mixing matrix of the round, and d the optimizer's direction:

    awc   X ← W X − γ d(g(X))         adapt while communicating: the exchange overlaps forward and backward
    atc   X ← W (X − γ d(g(X)))       adapt, then communicate: smaller error, no overlap

Lian et al. 2017, arXiv:1705.09056 (D-PSGD); Ying et al. 2021, arXiv:2110.13363 (exponential graphs);
Takezawa et al. 2023, arXiv:2305.11420 (the exact mean for every number of ranks).

**push_sum.** Stochastic gradient push: gossip on directed graphs, where a rank may send to ranks that send it nothing.

For z_r the weights of rank r, A the column-stochastic matrix of the round, and p_r the push-sum weight of rank r, 1 at
first:

    u ← p z − γ d(g(z))            the local step, taken by the optimizer
    u ← A u;     p ← A p           Σ u and Σ p do not change
    z ← u / p

The p of all ranks follow from the graphs alone: each rank computes them, and only u is sent. Where A is doubly
stochastic, p stays 1 and this is ATC.

Push-sum: Kempe, Dobra and Gehrke 2003, "Gossip-Based Computation of Aggregate Information",
doi:10.1109/SFCS.2003.1238221. With gradients: Nedić and Olshevsky 2016, "Stochastic Gradient-Push for Strongly Convex
Functions on Time-Varying Directed Graphs", arXiv:1406.2075; Assran et al. 2019, "Stochastic Gradient Push for
Distributed Deep Learning" (SGP), arXiv:1811.10792.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..arguments import check_fields, checked
from ..buckets import Bucket
from ..comm import Comm
from ..costs import Cost, Load, Place, degree
from ..keeping import finite, update_if_finite_, wide_copy
from ..primitives.neighbors import links, mixed, round_of
from ..rules import Rule, after_step, between_steps
from ..schedules import Every
from ..stages import NeighborMean, Stage, State
from ..topology import OnePeerExact, Topology


@checked
def decentralized(topology: Topology | None = None, order: Literal["awc", "atc"] = "awc", every: Every = 1) -> Rule:
    """Average weights with this round's neighbours.

    Sends the size of the weights to each neighbour, for any number of ranks. Weights differ between ranks;
    `att.merge()` averages them before they are evaluated or saved.

    Args:
        topology: the graph; its matrices must be doubly stochastic. None: `OnePeerExact()`, at most
            one message per exchange and the exact mean after few of them, for every number of ranks: one-peer
            exponential for n = 2^k, BaseK(1) otherwise.
        order: "awc" or "atc"; see the module for the equations.
        every: the number of steps between exchanges, or a function as in `bk.between_steps`.

    Raises:
        ValueError: there is no such `order`, or `every` is less than 1; from `attach`, the matrices are not doubly
            stochastic for this number of ranks.
        TypeError: `topology` is not a topology.
    """
    stage = NeighborMean(OnePeerExact() if topology is None else topology)
    return between_steps(stage, every=every) if order == "awc" else after_step(stage, every=every)


@dataclass(frozen=True, repr=False)
class PushSum(Stage):
    """u ← A (p z + x − z);  p ← A p;  z ← u / p;  x ← z,  for x the weights after a local step from z.

    The state holds z, in fp32 at least, and p (n,) in fp64. A z that is not finite is passed on and not kept.
    """

    topology: Topology
    elementwise: ClassVar = {"z": "keep"}
    follows: ClassVar[tuple[str, ...]] = ("z",)

    def __post_init__(self) -> None:
        check_fields(self)

    def check(self, comm: Comm) -> None:
        self.topology.period(comm.size)  # raises if rounds are not known beforehand
        if not self.topology.column_stochastic(comm.size):
            raise ValueError(
                f"the columns of {self.topology!r} do not sum to 1 for {comm.size} ranks, so its sum would drift; "
                "use FromDigraph(…) or Exponential()"
            )

    def init(self, bucket: Bucket, comm: Comm) -> State:
        z = wide_copy(bucket.flat)
        return {"z": z, "p": torch.ones(comm.size, dtype=torch.float64)}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return x
        z, p, r = state["z"], state["p"], comm.rank
        round = round_of(self.topology, comm)
        weights, targets = links(self.topology, r, comm.size, round)
        moved = x.to(z.dtype) - z.to(x.dtype).to(z.dtype)  # the model was given a rounded z
        u = moved.add_(z, alpha=float(p[r]))
        received = comm.exchange(u, [peer for peer in weights if peer != r], targets)
        u = mixed(u, weights[r], [(weights[peer], theirs) for peer, theirs in received.items()])
        p.copy_(matrix_of(self.topology, comm.size, round) @ p)
        u.div_(float(p[r]))
        update_if_finite_(z, u, where=finite(u))
        return x.copy_(u)

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost: w = 4 N to each of k neighbours;  q = 6 + (k + 2)/2 copies."""
        if place.ranks == 1:
            return Cost()
        S, k = load.fp32.size, degree(self.topology, place.ranks)
        return place.messages(k, S) + place.copies(6 + (k + 2) / 2, S)


@lru_cache(maxsize=256)
def matrix_of(topology: Topology, size: int, round: int) -> Tensor:
    """Return A (size, size) of one round, in fp64."""
    return torch.from_numpy(topology.matrix(size, round))


@checked
def push_sum(topology: Topology, every: Every = 1) -> Rule:
    """Train by decentralized SGD on a directed graph, which may change from round to round.

    Sends the weights, in fp32 at least, to each rank that receives from this one; costs a copy of the weights. Weights
    differ between ranks; `att.merge()` averages them.

    Args:
        topology: column-stochastic, such as `FromDigraph(…)`, or doubly stochastic.
        every: the number of steps between exchanges, or a function as in `bk.after_step`.

    Raises:
        TypeError: `topology` is not a topology.
        ValueError: `every` is less than 1; from `attach`, columns do not sum to 1 for this number of ranks.
    """
    return after_step(PushSum(topology), every=every)
