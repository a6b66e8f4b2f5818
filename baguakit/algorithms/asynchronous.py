"""Asynchronous gossip: ranks average their weights with what has come from their neighbours, and nobody waits.

Ranks write into each other's windows (`bk.Window`), whole messages only. A slow rank or link delays nobody. The edges
of a rank that has ended are dropped; under `bk.elastic`, the group goes on with new edges when ranks join or are lost.

**async_gossip.** Two neighbours take turns: j answers what has come from r with its own weights, and both move.

For x_r the weights of rank r after a local step, x̌_r those that it sent, and W the mixing matrix:

    x_j ← x_j + w_jr (x̌_r − x̌_j);   x_r ← x_r + w_rj (x̌_j − x̌_r)

W is symmetric, so the mean over ranks moves with local steps only, however old x̌ are. Averages with values that are τ
steps old would let it move 1 + (1 − w_rr) τ times less. They are taken only with a `staleness`, which bounds τ, or if W
is not symmetric: x_r ← (w_rr x_r + Σ_j w_rj x̂_rj) / (w_rr + Σ_j w_rj), for x̂_rj the latest weights of rank j that have
come to rank r, where the sums are over the neighbours that live, and from which something has come.

Lian et al. 2018, "Asynchronous Decentralized Parallel Stochastic Gradient Descent" (AD-PSGD), arXiv:1710.06952.

**async_push_sum.** Ranks pass on shares of their weights, and of a mass that says how much these count.

For x_r the weights of rank r after a local step, p_r its mass (1 at first), and A a column-stochastic matrix:

    u ← p_r x_r;   send a_jr (u, p_r) to each j that has taken the last message; keep the rest
    add all (u, p) that have come to what is kept;   x_r ← u / p_r

Each message is added once, however often it is sent; what a lost rank has not confirmed comes back. So among the living
Σ u and Σ p stay as they were, but for local steps, and the mean is exact however long messages take. A rank with a mass
below `LEAST` keeps all of it, so that p_r never vanishes.

A local step moves u by p_r times its change of x. (In SGP it moves u by the whole change, so x by 1/p_r of it: without
bound, where a rank sends more often than it receives.)

In turns each step counts alike, so that a faster rank counts more. In averages and push-sum ranks count alike if the
matrix is doubly stochastic and no link is busy: the faster a rank, the more often it mixes, or the less mass it has.

Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning" (SGP, with overlap), arXiv:1811.10792.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import Natural, checked
from ..buckets import Bucket
from ..comm import Comm
from ..compressors import Compressor, MinMaxUInt8
from ..costs import Cost, Load, Place, degree, exchange
from ..keeping import wide_copy
from ..rules import Algorithm, free_running
from ..schedules import Every
from ..stages.base import State
from ..stages.means import OnGraph
from ..topology import Ring, Topology
from ..windows import Window

LEAST = 2.0**-6  # of the mass of a rank that sends


class Turns:
    """The exchanges of a rank with its neighbours: it begins those with higher ranks, and answers lower ones."""

    def __init__(self) -> None:
        self.sent: dict[int, Tensor] = {}  # to neighbours that are to answer
        self.seen: dict[int, int] = {}  # messages of each neighbour

    @torch.no_grad()
    def take(self, window: Window) -> int:
        """Mix what has come, send answers, and begin again; return the number of messages."""
        (own,), rank, (_, weights, _) = window._tensors, window.comm.rank, window._row
        came = [j for j in weights if window._memory.total[j] > self.seen.get(j, 0)]
        before = own.clone()
        mixed = before.to(window._format.wide, copy=True)
        for j in came:
            self.seen[j] = window._memory.total[j]
            mixed.add_(window._memory.buffers[j].to(mixed) - self.sent.get(j, before), alpha=weights[j])
        own.copy_(mixed)
        answers = [j for j in came if j < rank]
        begun = [j for j in weights if j > rank and (j in came or j not in self.sent)]
        window.put(before, answers, wait=False)
        window.put(None, begun, wait=False)
        self.sent |= dict.fromkeys(begun, own.clone() if begun else own)
        return len(answers) + len(begun)


@dataclass(frozen=True, repr=False)
class WindowMean(OnGraph):
    """x_r ← x_r + w_rj (x̌_j − x̌_r), in turns with each neighbour j;  see the module. The state has a window."""

    staleness: Natural | None = None
    turns: ClassVar[bool] = True
    one_sided: ClassVar[bool] = True
    exchanges: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    constant_weights: ClassVar[bool] = True
    needs = ("static", "doubly_stochastic")
    refusal = "{stage} needs the same doubly stochastic matrix in all rounds for {n} ranks; use Ring() or Exponential()"

    def init(self, bucket: Bucket, comm: Comm) -> State:
        self.prepare(bucket.flat, comm)
        if comm.size == 1:
            return {}
        x = wide_copy(bucket.flat) if self.copies else bucket.flat.detach().clone()
        window = Window(x, self.topology, comm, next(iter(self.compressors()), None), zero=True)
        turns = self.staleness is None and self.turns and self.topology.symmetric(comm.size)
        return {"window": window} | ({"turns": Turns()} if turns else {})

    def row_bytes(self, x: Tensor) -> int:
        return x.nbytes

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return x
        window = state["window"]
        (own,) = window._tensors
        own.copy_(x).mul_(window.p)
        sent = state["turns"].take(window) if "turns" in state else self._exchange(window)
        comm._count(sent * self.row_bytes(own))
        return x.copy_(own.div_(window.p))

    def _exchange(self, window: Window) -> int:
        """Send, and mix what has come; return the number of messages."""
        window._memory.p = 1.0  # and 0 of a buffer into which nothing has come: so the sum of p is what to divide by
        window.put(wait=False)
        window.update(staleness=self.staleness)
        return len(window._row[2])


@dataclass(frozen=True, repr=False)
class CompressedWindowMean(WindowMean):
    """The same with weights in the format of a compressor: puts send the changes of replicas."""

    compressor: Compressor = MinMaxUInt8()

    def row_bytes(self, x: Tensor) -> int:
        return self.compressor.row_bytes(x.numel())

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        saves = self.row_bytes(x) < x.nbytes
        comm.note(self.compressor, self.compressor, "" if saves else "its values are as long as exact ones")
        return super().__call__(x, state, comm)

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of row(N) bytes to each of k neighbours: N (k compress + 2 k decompress), and 4 copies."""
        if place.ranks == 1:
            return Cost()
        N, c, k = load.values, self.compressor, degree(self.topology, place.ranks)
        speed = place.network.codec(c)
        q = N * k * (speed.compress + 2 * speed.decompress) + place.copies(4, load.fp32.size).busy
        return exchange(place.link.exchange, min(k, 1), k * c.row_bytes(N), q)


@dataclass(frozen=True, repr=False)
class WindowPushSum(WindowMean):
    """u ← p x;  (u, p) ← a_rr (u, p) + Σ_j a_rj (u_j, p_j) that have come;  x ← u / p;  see the module."""

    copies: ClassVar[float] = 4
    turns: ClassVar[bool] = False
    needs = ("static", "column_stochastic")
    refusal = "{stage} needs the same matrix in all rounds, whose columns sum to 1, for {n} ranks; use Exponential()"

    def _exchange(self, window: Window) -> int:
        rank, n, waits = window.comm.rank, window.comm.size, self.staleness is not None
        mass, busy = float(window.p >= LEAST), {} if waits else window.pending
        shares = {j: mass * self.topology.weights(j, n, 0)[rank] for j in window._row[2] if j not in window.lost}
        shares = {j: share for j, share in shares.items() if waits or (share and not busy[j])}
        window.accumulate(dst_weights=shares, self_weight=1 - sum(shares.values()), wait=False)
        window.collect(staleness=self.staleness)
        return len(shares)


@checked
def async_gossip(
    topology: Topology = Ring(),
    compressor: Compressor | None = None,
    staleness: Natural | None = None,
    every: Every = 1,
) -> Algorithm:
    """Train by asynchronous gossip: average the weights with those of each neighbour, as often as its link allows.

    Sends the weights to a neighbour at most in every second exchange. Costs memory for two copies of the weights, and
    two for each neighbour. Ranks may make different numbers of steps. A saved state holds nothing under way.

    Args:
        topology: static and doubly stochastic.
        compressor: the format of the weights, whose changes are sent; None for exact ones.
        staleness: the number of exchanges by which a rank may be ahead of what has come from a neighbour: then it
            waits. None: it never waits.
        every: the number of steps between exchanges, or a function as in `bk.between_steps`.
    """
    if compressor is None:
        return free_running(WindowMean(topology, staleness), every=every)
    return free_running(CompressedWindowMean(topology, staleness, compressor), every=every)


@checked
def async_push_sum(topology: Topology = Ring(), staleness: Natural | None = None, every: Every = 1) -> Algorithm:
    """Train by asynchronous push-sum: pass on shares of the weights, on a directed graph too, and lose none of them.

    Sends the weights, in fp32 at least, to each out-neighbour, as often as its link allows. Costs memory as
    `async_gossip` does. Ranks may make different numbers of steps. A saved state holds nothing under way.

    Args:
        topology: static and column-stochastic, such as `FromDigraph(…)`, or doubly stochastic.
        staleness, every: as in `async_gossip`. With a staleness, each exchange sends to all out-neighbours.
    """
    return free_running(WindowPushSum(topology, staleness), every=every)
