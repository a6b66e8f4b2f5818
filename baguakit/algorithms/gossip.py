"""Gossip: ranks average their weights with a few neighbours in each step.

**decentralized.** Decentralized SGD: each rank averages its own weights x_r with the weights of a few other ranks.

For X the weights of all ranks, a row each, W the mixing matrix of the round, and γ d(g(X)) the optimizer's step:

    awc   X ← W X − γ d(g(X))         adapt while communicating: the exchange overlaps forward and backward
    atc   X ← W (X − γ d(g(X)))       adapt, then communicate: smaller error, no overlap

Lian et al. 2017, arXiv:1705.09056 (D-PSGD); Ying et al. 2021, arXiv:2110.13363 (exponential graphs);
Takezawa et al. 2023, arXiv:2305.11420 (the exact mean for every number of ranks).

**push_sum.** Stochastic gradient push: gossip on directed graphs. A rank may send to ranks that do not send to it.

For z_r the weights of rank r, p_r the push-sum weight of rank r (1 at first), u_r the values that rank r sends, A the
column-stochastic matrix of the round, and γ d(g(z)) the optimizer's step:

    u ← p z − c γ d(g(z))          the local step, taken by the optimizer; c = 1 without weights (`comm.share`)
    u ← A u;     p ← A p           Σ u and Σ p do not change
    z ← u / p

Each rank computes all p from the graphs, so only u is sent. If A is doubly stochastic, p stays 1: push-sum equals ATC.

Push-sum: Kempe, Dobra and Gehrke 2003, "Gossip-Based Computation of Aggregate Information",
doi:10.1109/SFCS.2003.1238221. With gradients: Nedić and Olshevsky 2016, "Stochastic Gradient-Push for Strongly Convex
Functions on Time-Varying Directed Graphs", arXiv:1406.2075; Assran et al. 2019 (SGP), arXiv:1811.10792.

**low_precision_decentralized.** DCD-SGD: each rank has a replica of its weights and sends the replica's changes.

For r_i the replica of rank i, W the mixing matrix, x_i the weights after a local step, and Q the compressor: rank i
sends only q_i, the compressed change of r_i. Rank i keeps r_i and the sum s_i = Σ_{j ≠ i} w_ij r_j, to which it adds
w_ij q_j for each neighbour j. Both r_i and s_i have the size of the model, for any number of neighbours.

    q_i ← Q(x_i − r_i + (W r)_i − r_i);   r_i ← r_i + q_i;   x_i ← r_i

Tang et al. 2018, "Communication Compression for Decentralized Training" (DCD-PSGD), arXiv:1803.06443.

**choco.** CHOCO-SGD: as DCD, but with a step size γ, and with separate r_i and s_i for each round of W's period.

    q_i ← Q(x_i − r_i);   r_i ← r_i + q_i;   x_i ← x_i + γ ((W r)_i − r_i)

W may change from round to round. Rank i sends q_i only to its neighbours in this round, and may have other neighbours
in the next round; so each round has separate r_i and s_i. With `OnePeerExact()`, a rank sends one compressed message a
step for any number n of ranks; for n a power of two, it keeps 2 log₂ n copies of the weights.

Koloskova, Stich and Jaggi 2019, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
Communication", arXiv:1902.00340.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import tee
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..arguments import Range, checked
from ..buckets import Bucket
from ..comm import Comm, times_
from ..compressors import Compressor, MinMaxUInt8
from ..costs import Cost, Load, Place, degree, exchange
from ..keeping import finite, update_if_finite_, wide_copy
from ..lanes import New, temporaries
from ..primitives import neighbor_mean_
from ..primitives.compressed import pieces_of, row_pieces
from ..primitives.neighbors import links, links_in, mixed, round_of
from ..primitives.transports import bytes_for, exchanged
from ..rules import Algorithm, after_step, between_steps
from ..schedules import Every
from ..stages import NeighborMean, OnGraph, State
from ..topology import OnePeerExact, Ring, Topology


@checked
def decentralized(
    topology: Topology | None = None, order: Literal["awc", "atc"] = "awc", every: Every = 1
) -> Algorithm:
    """Train by decentralized SGD: in each exchange, a rank averages its weights with its neighbours' weights.

    Sends the weights to each neighbour.

    Args:
        topology: the graph; its matrices must be doubly stochastic. None: `OnePeerExact()`, which sends at most one
            message per exchange and gives the exact mean after few exchanges, for every number of ranks.
        order: "awc" or "atc"; see the module for the equations.
        every: the number of steps between exchanges, or a function as in `bk.between_steps`.
    """
    stage = NeighborMean(OnePeerExact() if topology is None else topology)
    return between_steps(stage, every=every) if order == "awc" else after_step(stage, every=every)


@dataclass(frozen=True, repr=False)
class PushSum(OnGraph):
    """u ← A (p z + c (x − z));  p ← A p;  z ← u / p;  x ← z,  for x the weights after a local step from z.

    A is the matrix of the round. The state is z, in fp32 at least, and p (n,) in fp64; z changes to finite values only.
    """

    copies: ClassVar[float] = 6
    exchanges: ClassVar[bool] = True
    joint: ClassVar[bool] = False
    elementwise: ClassVar = {"z": "keep"}
    follows: ClassVar[tuple[str, ...]] = ("z",)
    needs = ("column_stochastic",)
    refusal = "the columns of {topology} do not sum to 1 for {n} ranks: sums drift; use FromDigraph(…) or Exponential()"

    def check(self, comm: Comm) -> None:
        self.topology.period(comm.size)  # raises if rounds are not known beforehand
        super().check(comm)

    def init(self, bucket: Bucket, comm: Comm) -> State:
        return {"z": wide_copy(bucket.flat), "p": torch.ones(comm.size, dtype=torch.float64)}

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return x
        z, p, r = state["z"], state["p"], comm.rank
        round = round_of(self.topology, comm)
        own, weights, targets = links(self.topology, r, comm.size, round)
        moved = x.to(z.dtype) - z.to(x.dtype).to(z.dtype)  # the model was given a rounded z
        u = (moved if comm.share == 1 else times_(moved, comm.share)).add_(z, alpha=float(p[r]))
        u = mixed(u, own, weights, comm.exchange(u, weights, targets))
        p.copy_(matrix_of(self.topology, comm.size, round) @ p)
        u.div_(float(p[r]))
        update_if_finite_(z, u, where=finite(u))
        return x.copy_(u)


@lru_cache(maxsize=256)
def matrix_of(topology: Topology, size: int, round: int) -> Tensor:
    return torch.from_numpy(topology.matrix(size, round))


@checked
def push_sum(topology: Topology, every: Every = 1) -> Algorithm:
    """Train by decentralized SGD on a directed graph, which may change from round to round.

    Sends the weights, in fp32 at least, to each out-neighbour. Costs memory for a copy of the weights.

    Args:
        topology: column-stochastic, such as `FromDigraph(…)`, or doubly stochastic.
        every: as in `decentralized`.
    """
    return after_step(PushSum(topology), every=every)


class Piece(NamedTuple):
    """A piece of a rank's weights, and the same piece of the replicas for one round of the period."""

    x: Tensor
    r: Tensor  # its own replica
    s: Tensor  # Σ_{j ≠ i} w_ij r_j
    own: float  # w_ii of the round
    weights: dict[int, float]  # w_ij of the neighbours

    def pull(self, new: New) -> Tensor:
        """Return (W r)_i − r_i."""
        return torch.add(self.s, self.r, alpha=self.own - 1, out=new(self.r))


@dataclass(frozen=True, repr=False)
class Gossip(OnGraph):
    """The common base of DCD and CHOCO: gossip with replicas, to which compressed changes are added."""

    compressor: Compressor = MinMaxUInt8()
    constant_weights: ClassVar[bool] = True
    elementwise: ClassVar = {"replica": "anew", "neighbors": "anew"}  # if ranks change, so does Σ
    follows: ClassVar[tuple[str, ...]] = ("replica", "neighbors")

    def multiple_of(self, comm: Comm) -> int:
        return 64

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Return r and s for each round. r is a copy of the weights; for s, ranks send their weights uncompressed."""
        self.prepare(bucket.flat, comm)
        x = bucket.flat.to(torch.promote_types(bucket.flat.dtype, torch.float32))
        state: State = {"replica": {}, "neighbors": {}}
        for k in range(self.topology.period(comm.size)):
            own, _, _ = links_in(self.topology, comm.at(k))
            state["replica"][str(k)] = x.clone()
            state["neighbors"][str(k)] = neighbor_mean_(x.clone(), self.topology, comm.at(k)).sub_(x, alpha=own)
        return state

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        """Send the compressed change in pieces. Mix each piece when the bytes of all neighbours have arrived."""
        comm.note(self.compressor, self.compressor)
        if comm.size == 1:
            return x
        c, k = self.compressor, round_of(self.topology, comm)
        own, others, targets = links_in(self.topology, comm)
        r, s = state["replica"][str(k)], state["neighbors"][str(k)]
        by_nccl = comm._by_nccl(x.device)
        runs = row_pieces(x.numel(), 1, by_nccl) if c.dense else (slice(x.numel()),)  # a sparse one selects from all
        parts = [Piece(x[run], r[run], s[run], own, others) for run in runs]
        incoming = {p: [bytes_for(1, len(each.x), c, x.device) for each in parts] for p in others}

        def changes() -> Iterator[Tensor]:
            for tag, each in enumerate(parts):
                with temporaries() as new:
                    packed = c._unchecked_compress(self._change(each, new).view(1, -1), None, comm.key(tag))
                yield packed

        def mix(i: int, packed: Tensor) -> None:
            with temporaries() as new:
                q, received = self._decompressed(packed, parts[i].r, new), {p: sent[i] for p, sent in incoming.items()}
                self._mix_(parts[i], q, received, new)

        mine, *sent = tee(changes(), 1 + len(targets))  # all neighbours are sent the same
        outgoing, left = dict(zip(targets, sent, strict=True)), [len(incoming)] * len(parts)
        comm.agree_on_shares()
        for _, i in exchanged(comm, outgoing, incoming, x.device):
            left[i] -= 1
            if not left[i]:
                mix(i, next(mine))
        for i, packed in enumerate(mine if not incoming else ()):  # if this rank receives nothing
            mix(i, packed)
        return x

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of sending row(N) bytes to each of k neighbours, in pieces.

        q is N (compress + (k + 1) decompress) plus the time of 7 + 2 k copies, with the letters of `baguakit.costs`.
        """
        n, N, c = place.ranks, load.values, self.compressor
        if n == 1:
            return Cost()
        speed, k = place.network.codec(c), degree(self.topology, n)
        q = N * (speed.compress + (k + 1) * speed.decompress) + place.copies(7 + 2 * k, load.fp32.size).busy
        pieces = pieces_of(N, place.gpu) if c.dense else 1
        return exchange(place.link.exchange, min(k, 1), k * c.row_bytes(N), q, pieces)

    def _change(self, here: Piece, new: New) -> Tensor:
        return torch.sub(here.x, here.r, out=new(here.r))

    def _mix_(self, here: Piece, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        """Update a piece with this rank's change q, and with the changes `received` from the neighbours."""
        raise NotImplementedError

    def _decompressed(self, packed: Tensor, like: Tensor, new: New) -> Tensor:
        """Return the decompressed change of a piece, equal on the rank that sent it and on its neighbours."""
        out = new(like).view(1, -1)
        return self.compressor._unchecked_decompress(packed, like.numel(), out.dtype, out)[0]

    def _follow(self, here: Piece, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        """Add the change q to this rank's replica, and the changes `received` to the sum of the neighbours' replicas.

        A change that is not finite is added to no replica. All ranks do the same, because they test the same bytes.
        """
        here.r.add_(zero_unless_finite(q))
        for peer, packed in received.items():
            here.s.add_(zero_unless_finite(self._decompressed(packed, q, new)), alpha=here.weights[peer])


def zero_unless_finite(q: Tensor) -> Tensor:
    """Return q if all its values are finite, else zeros. The host does not wait for a GPU."""
    ok = finite(q)
    return torch.where(ok, q, 0.0) if not q.is_cpu else q if ok else torch.zeros_like(q)


@dataclass(frozen=True, repr=False)
class DifferenceCompression(Gossip):
    """DCD:  q ← Q(x − r + W r − r);  r ← r + q;  x ← r;  see the module for the letters."""

    needs = ("static", "symmetric", "doubly_stochastic")
    refusal = (
        "{stage} mixes replicas as old as the round before, for which the graph must be static and symmetric; "
        "{topology} is not for {n} ranks: use Ring() or FullyConnected(), or choco() with gamma=1"
    )

    def _change(self, here: Piece, new: New) -> Tensor:
        return here.pull(new).add_(here.x).sub_(here.r)

    def _mix_(self, here: Piece, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        torch.add(here.r, q, out=here.x)
        self._follow(here, q, received, new)


@checked
def low_precision_decentralized(
    topology: Topology = Ring(), compressor: Compressor = MinMaxUInt8(), every: Every = 1
) -> Algorithm:
    """Train by decentralized SGD that sends compressed differences (DCD): a quarter of the bytes of `decentralized`.

    Args:
        topology: static, symmetric and doubly stochastic; `choco` also takes topologies that change.
        compressor: one whose error is small relative to the values, such as MinMaxUInt8.
        every: the number of steps between exchanges, or a function as in `bk.after_step`.
    """
    return after_step(DifferenceCompression(topology, compressor), every=every)


@dataclass(frozen=True, repr=False)
class Choco(Gossip):
    """CHOCO:  q ← Q(x − r);  r ← r + q;  x ← x + γ (W r − r).  Each round of W's period has a separate r."""

    gamma: Annotated[float, Range(above=0, most=1)] = 0.5
    needs = ("doubly_stochastic",)
    refusal = "{topology} is not doubly stochastic for {n} ranks and would move the mean; use OnePeerExact() or Ring()"

    def check(self, comm: Comm) -> None:
        t, n = self.topology, comm.size
        if t.period(n) > 64:  # a rank would keep more than 128 copies of its weights
            raise ValueError(
                f"{self!r} remembers two copies of the weights for each round of a period, and {t!r} has more than 64 "
                f"for {n} ranks: use OnePeerExact()"
            )
        super().check(comm)

    def _mix_(self, here: Piece, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        self._follow(here, q, received, new)
        here.x.add_(here.pull(new).to(here.x.dtype), alpha=self.gamma)


@checked
def choco(
    topology: Topology = Ring(), compressor: Compressor = MinMaxUInt8(), gamma: float = 0.5, every: Every = 1
) -> Algorithm:
    """Train by decentralized SGD with any compressor (CHOCO): gossip does not change the mean of the weights.

    `choco(OnePeerExact(), gamma=1.0)` sends one byte per weight and step; `bytegrad` sends 2 (n − 1)/n bytes.

    Args:
        topology: doubly stochastic, with a period of at most 64 rounds. Each round costs two copies of the weights.
        compressor: any. A coarser compressor needs a smaller gamma.
        gamma: the step size γ towards the neighbours, above 0 and at most 1. Without compression, γ = 1 is
            ATC. With TopK(0.05) begin at 0.3; if `consensus_distance()` keeps growing, γ is too large.
        every: as in `low_precision_decentralized`.
    """
    return after_step(Choco(topology, compressor, gamma=gamma), every=every)
