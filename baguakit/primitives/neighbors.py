"""Averages with a few neighbours."""

from functools import lru_cache

import torch
from torch import Tensor

from ..comm import Comm
from ..topology import Topology
from .flat import on_flat
from .means import mean_


@on_flat
def neighbor_mean_(x: Tensor, topology: Topology, comm: Comm) -> Tensor:
    """Average `x` with this round's neighbours:  x ← Σ_j w_rj x_j, row r of the mixing matrix W.

    Products are summed in fp32 (fp64 for fp64) in the order of the row, this rank's own first. A matrix whose entries
    are all 1/n is the exact mean, and is left to `mean_`.

    Args:
        x: a floating tensor of any shape, or a list of them; overwritten.
        topology: who hears whom, such as `topology.Ring()`.
        comm: the group, at the round to play: `comm.at(round)`. A static topology needs no round.

    Raises:
        ValueError: the topology changes from round to round and `comm` stands at none, or does not fit the group.
    """
    if comm.size == 1:
        return x
    topology.check(comm.size)
    period = topology.period(comm.size)
    round = comm.round % period if period > 1 else 0
    if is_mean(topology, comm.size, round):
        return mean_(x, comm)  # type: ignore[no-any-return]
    weights, targets = links(topology, comm.rank, comm.size, round)
    received = comm.exchange(x, [peer for peer in weights if peer != comm.rank], targets)
    return x.copy_(mixed(x, weights[comm.rank], [(weights[peer], theirs) for peer, theirs in received.items()]))


def mixed(x: Tensor, weight: float, others: list[tuple[float, Tensor]]) -> Tensor:
    """weight · x + Σ w · other, accumulated in fp32 at least; overwrites `x` if that is its dtype."""
    sum_ = x if x.dtype in (torch.float32, torch.float64) else x.float()
    sum_.mul_(weight)
    for w, theirs in others:
        sum_.add_(theirs, alpha=w)
    return sum_


@lru_cache(maxsize=4096)
def links(topology: Topology, rank: int, size: int, round: int) -> tuple[dict[int, float], tuple[int, ...]]:
    """What a rank hears, with weights (its own first), and the ranks that hear it."""
    row = topology.weights(rank, size, round)
    weights = {rank: row.get(rank, 0.0), **{peer: w for peer, w in sorted(row.items()) if peer != rank}}
    return weights, tuple(peer for peer in topology.targets(rank, size, round) if peer != rank)


@lru_cache(maxsize=4096)
def is_mean(topology: Topology, size: int, round: int) -> bool:
    """Whether one round is the exact mean over all ranks."""
    if len(topology.weights(0, size, round)) < size:  # then the matrix need not be made
        return False
    return bool((topology.matrix(size, round) == 1 / size).all())
