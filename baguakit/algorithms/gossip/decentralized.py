"""Decentralized SGD: each rank keeps its own weights x_r and averages them with those of a few others.

For X the weights of all ranks, a row each, W the mixing matrix of the round, and d the optimizer's direction:

    awc   X ← W X − γ d(g(X))         adapt while communicating: the exchange overlaps forward and backward
    atc   X ← W (X − γ d(g(X)))       adapt, then communicate: smaller error, no overlap

Lian et al. 2017, arXiv:1705.09056 (D-PSGD); Ying et al. 2021, arXiv:2110.13363 (exponential graphs);
Takezawa et al. 2023, arXiv:2305.11420 (the exact mean for every number of ranks).
"""

from typing import Literal

from ...arguments import checked
from ...rules import Every, Rule, after_step, between_steps
from ...stages import NeighborMean
from ...topology import OnePeerExact, Topology


@checked
def decentralized(topology: Topology | None = None, order: Literal["awc", "atc"] = "awc", every: Every = 1) -> Rule:
    """Average weights with this round's neighbours.

    Sends the size of the weights to each neighbour, for any number of ranks. Weights differ between ranks;
    `att.merge()` averages them before they are evaluated or saved.

    Args:
        topology: the graph; its matrices must be doubly stochastic. None: `OnePeerExact()`, at most
            one message per exchange and the exact mean after few of them, for every number of ranks: one-peer
            exponential for n = 2^k, BaseK(1) otherwise.
        order: "awc" or "atc", the equations are those of the module.
        every: exchange only in every so many steps; a number, or a function as in `bk.between_steps`.

    Raises:
        ValueError: there is no such `order`, or `every` is less than 1; from `attach`, the matrices are not doubly
            stochastic for as many ranks.
        TypeError: `topology` is not a topology.
    """
    stage = NeighborMean(OnePeerExact() if topology is None else topology)
    return between_steps(stage, every=every) if order == "awc" else after_step(stage, every=every)
