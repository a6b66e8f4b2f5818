"""Compressed gossip: ranks send compressed differences from replicas, which their neighbours know as well.

For r_i the replica of rank i and q_i the compressed difference that it sends, r_i ← r_i + q_i on every rank that keeps
r_i; W is the mixing matrix, x_i the weights after a local step, and Q the compressor. Only q_i is sent. A rank keeps
its own r_i and the sum s_i = Σ_{j ≠ i} w_ij r_j, to which w_ij q_j is added when q_j arrives: two copies of the model
for any number of neighbours.

**low_precision_decentralized.** DCD-SGD: differences from replicas as old as the round before.

    q_i ← Q(x_i − r_i + (W r)_i − r_i);   r_i ← r_i + q_i;   x_i ← r_i

Tang et al. 2018, "Communication Compression for Decentralized Training" (DCD-PSGD), arXiv:1803.06443.

**choco.** CHOCO-SGD: with a step size, and with one pair of replicas for each round.

    q_i ← Q(x_i − r_i);   r_i ← r_i + q_i;   x_i ← x_i + γ ((W r)_i − r_i)

The replicas are up to date before they are mixed, so W may
change from round to round: the ranks that hear a rank in one round of the period have not heard what it sent in the
others, and each round has r_i and s_i of its own. One peer a round is then one message of compressed values, for any
number of ranks, and 2 ⌈log₂ n⌉ copies of the weights.

Koloskova, Stich and Jaggi 2019, "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
Communication", arXiv:1902.00340.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import tee
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..arguments import check_fields, checked, real
from ..buckets import Bucket
from ..comm import Comm
from ..compressors import Compressor, MinMaxUInt8
from ..costs import Cost, Load, Place, degree, exchange, neighbors
from ..keeping import finite
from ..lanes import New, temporaries
from ..primitives import neighbor_mean_
from ..primitives.compressed import pieces_of, row_pieces
from ..primitives.neighbors import links, round_of
from ..primitives.transports import exchanged
from ..rules import Rule, after_step
from ..schedules import Every
from ..stages import Stage, State
from ..topology import Ring, Topology


class Replicas(NamedTuple):
    """The replicas of a rank for one round of the period, and its neighbours in that round."""

    r: Tensor  # its own replica
    s: Tensor  # Σ_{j ≠ i} w_ij r_j
    own: float  # w_ii
    weights: dict[int, float]  # w_ij of the others
    targets: tuple[int, ...]  # the ranks that receive from this one

    def at(self, run: slice) -> "Replicas":
        """Return the replicas of a piece."""
        return self._replace(r=self.r[run], s=self.s[run])

    def pull(self, new: New) -> Tensor:
        """Return (W r)_i − r_i."""
        return torch.add(self.s, self.r, alpha=self.own - 1, out=new(self.r))


@dataclass(frozen=True, repr=False)
class Gossip(Stage):
    """The common part of DCD and CHOCO: replicas that compressed changes update."""

    topology: Topology
    compressor: Compressor = MinMaxUInt8()
    elementwise: ClassVar = {"replica": "anew", "neighbors": "anew"}  # Σ over other ranks would be another sum
    follows: ClassVar[tuple[str, ...]] = ("replica", "neighbors")

    def __post_init__(self) -> None:
        check_fields(self)

    def multiple_of(self, comm: Comm) -> int:
        return 64

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """Set the replicas of every round of the period to the weights, which ranks send here uncompressed."""
        self.prepare(bucket.flat, comm)
        x = bucket.flat.to(torch.promote_types(bucket.flat.dtype, torch.float32))
        state: State = {"replica": {}, "neighbors": {}}
        for k in range(self.topology.period(comm.size)):
            own = links(self.topology, comm.rank, comm.size, k)[0][comm.rank]
            state["replica"][str(k)] = x.clone()
            state["neighbors"][str(k)] = neighbor_mean_(x.clone(), self.topology, comm.at(k)).sub_(x, alpha=own)
        return state

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        comm.note(self.compressor, self.compressor)
        if comm.size == 1:
            return x
        here = self._replicas(state, comm)
        for run, packed, received in self._exchanged(x, here, comm):
            with temporaries() as new:
                part = here.at(run)
                self._mix_(x[run], part, self._decompressed(packed, part.r, new), received, new)
        return x

    def cost(self, load: Load, place: Place) -> Cost:
        """Return the cost of row(N) to each of k neighbours, in pieces.

        q = N (compress + (k + 1) decompress) and 7 + 2 k copies.
        """
        n, N, c = place.ranks, load.values, self.compressor
        if n == 1:
            return Cost()
        line, speed, b, k = place.link.exchange, place.network.codec(c), c.row_bytes(N), degree(self.topology, n)
        q = N * (speed.compress + (k + 1) * speed.decompress) + place.copies(7 + 2 * k, load.fp32.size).busy
        return exchange(line, neighbors(line, k, b), k * b, q, pieces_of(N, place.gpu) if c.dense else 1)

    def _change(self, x: Tensor, here: Replicas, new: New) -> Tensor:
        """Return the part of a piece that is compressed and sent."""
        raise NotImplementedError

    def _mix_(self, x: Tensor, here: Replicas, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        """Update the weights and the replicas of a piece with q and the changes that neighbours sent."""
        raise NotImplementedError

    def _replicas(self, state: State, comm: Comm) -> Replicas:
        """Return the replicas of the round of `comm`."""
        k = round_of(self.topology, comm)
        row, targets = links(self.topology, comm.rank, comm.size, k)
        others = {peer: w for peer, w in row.items() if peer != comm.rank}
        return Replicas(state["replica"][str(k)], state["neighbors"][str(k)], row[comm.rank], others, targets)

    def _exchanged(self, x: Tensor, here: Replicas, comm: Comm) -> Iterator[tuple[slice, Tensor, dict[int, Tensor]]]:
        """Send Q(change) in pieces, then yield each piece with its bytes and the bytes of each neighbour."""
        c = self.compressor
        runs = (
            row_pieces(x.numel(), 1, x.is_cuda) if c.dense else (slice(0, x.numel()),)
        )  # a sparse one selects from all values
        lengths = [c._unchecked_row_bytes(run.stop - run.start) for run in runs]
        incoming = {p: [torch.empty(1, b, dtype=torch.uint8, device=x.device) for b in lengths] for p in here.weights}

        def changes() -> Iterator[Tensor]:
            for tag, run in enumerate(runs):
                with temporaries() as new:
                    change = self._change(x[run], here.at(run), new).view(1, -1)
                    packed = c._unchecked_compress(change, None, comm.key(tag))
                yield packed

        own, *others = tee(changes(), 1 + len(here.targets))  # all neighbours are sent the same
        outgoing, left = dict(zip(here.targets, others, strict=True)), [len(incoming)] * len(runs)
        comm.agree_on_shares()
        for _, i in exchanged(comm, outgoing, incoming, x.device):
            left[i] -= 1
            if not left[i]:
                yield runs[i], next(own), {p: pieces[i] for p, pieces in incoming.items()}
        yield from ((run, packed, {}) for run, packed in zip(runs, own, strict=False))  # if this rank hears nobody

    def _decompressed(self, packed: Tensor, like: Tensor, new: New) -> Tensor:
        """Return the change of a piece as the neighbours decompress it."""
        out = new(like).view(1, -1)
        return self.compressor._unchecked_decompress(packed, like.numel(), out.dtype, out)[0]

    def _follow(self, here: Replicas, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        """Add to each replica the change that its rank sent: q to this rank's, `received` to the neighbours'.

        A change that is not finite is added to no replica on any rank: all ranks judge by the same bytes.
        """
        here.r.add_(zero_unless_finite(q))
        for peer, packed in received.items():
            here.s.add_(zero_unless_finite(self._decompressed(packed, q, new)), alpha=here.weights[peer])


def zero_unless_finite(q: Tensor) -> Tensor:
    """Return q if all its values are finite, else zeros."""
    ok = finite(q)
    if ok.is_cpu:  # reading it does not synchronize
        return q if ok else torch.zeros_like(q)
    return torch.where(ok, q, 0.0)


@dataclass(frozen=True, repr=False)
class DifferenceCompression(Gossip):
    """DCD:  q ← Q(x − r + W r − r);  r ← r + q;  x ← r."""

    def check(self, comm: Comm) -> None:
        t, n = self.topology, comm.size
        if not (t.static(n) and t.symmetric(n) and t.doubly_stochastic(n)):
            raise ValueError(
                f"{self!r} mixes replicas as old as the round before, for which the graph must be static and "
                f"symmetric; {t!r} is not for {n} ranks: use Ring() or FullyConnected(), or choco() with gamma=1"
            )

    def _change(self, x: Tensor, here: Replicas, new: New) -> Tensor:
        return here.pull(new).add_(x).sub_(here.r)

    def _mix_(self, x: Tensor, here: Replicas, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        torch.add(here.r, q, out=x)
        self._follow(here, q, received, new)


@checked
def low_precision_decentralized(
    topology: Topology = Ring(), compressor: Compressor = MinMaxUInt8(), every: Every = 1
) -> Rule:
    """Train by decentralized SGD that sends compressed differences (DCD): a quarter of the bytes of `decentralized`.

    Args:
        topology: static, symmetric and doubly stochastic. Sends a message to each neighbour; `choco` also takes one
            that changes, and then sends to one peer a round.
        compressor: exact enough that its error shrinks with the values, such as MinMaxUInt8.
        every: the number of steps between exchanges, or a function as in `bk.after_step`.

    Raises:
        TypeError: `topology` is not a topology, or `compressor` not a compressor.
        ValueError: `every` is less than 1; from `attach`, the topology changes or is not symmetric.
    """
    return after_step(DifferenceCompression(topology, compressor), every=every)


LONGEST = 64  # rounds of a period: for longer ones a rank would keep more than 128 copies of its weights


@dataclass(frozen=True, repr=False)
class Choco(Gossip):
    """CHOCO:  q ← Q(x − r);  r ← r + q;  x ← x + γ (W r − r), with r of their own in each round of W's period."""

    gamma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        real("gamma", self.gamma, most=1, above=0)

    def check(self, comm: Comm) -> None:
        t, n = self.topology, comm.size
        if t.period(n) > LONGEST:
            raise ValueError(
                f"{self!r} remembers two copies of the weights for each round of a period, and {t!r} has more than "
                f"{LONGEST} for {n} ranks: use OnePeerExact()"
            )
        if not t.doubly_stochastic(n):
            raise ValueError(
                f"{self!r} would move the mean: the matrices of {t!r} are not doubly stochastic for {n} ranks; "
                "use OnePeerExact() or Ring()"
            )

    def _change(self, x: Tensor, here: Replicas, new: New) -> Tensor:
        return torch.sub(x, here.r, out=new(here.r))

    def _mix_(self, x: Tensor, here: Replicas, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        self._follow(here, q, received, new)
        x.add_(here.pull(new).to(x.dtype), alpha=self.gamma)


@checked
def choco(
    topology: Topology = Ring(), compressor: Compressor = MinMaxUInt8(), gamma: float = 0.5, every: Every = 1
) -> Rule:
    """Train by decentralized SGD with any compressor (CHOCO): gossip does not change the mean over ranks.

    The fewest bytes of all that gossip: `choco(OnePeerExact(), gamma=1.0)` sends one message a step, a byte for each
    weight, where `bytegrad` sends 2 (n − 1)/n.

    Args:
        topology: doubly stochastic; it may change from round to round. Keeps two copies of the weights for
            each round of its period.
        compressor: any; the coarser, the smaller gamma must be.
        gamma: the step size γ towards the neighbours; 1 without compression is ATC. With TopK(0.05) begin at 0.3; if
            `consensus_distance()` keeps growing, it is too large.
        every: the number of steps between exchanges, or a function as in `bk.after_step`.

    Raises:
        TypeError: `topology` is not a topology, or `compressor` not a compressor.
        ValueError: `gamma` is not in (0, 1], or `every` less than 1; from `attach`, the topology's matrices are not
            doubly stochastic, or its period is longer than 64 rounds.
    """
    return after_step(Choco(topology, compressor, gamma=gamma), every=every)
