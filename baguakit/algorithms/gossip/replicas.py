"""Replicas: copies of the weights that neighbours know as well, updated by compressed differences.

For r_i the replica of rank i and q_i the compressed difference that it sends, r_i ← r_i + q_i on every rank that keeps
r_i. A rank keeps its own r_i and the sum s_i = Σ_{j ≠ i} w_ij r_j, to which w_ij q_j is added when q_j arrives: two
copies of the model for any number of neighbours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import tee
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...arguments import check_fields
from ...buckets import Bucket
from ...comm import Comm
from ...compressors import Compressor, MinMaxUInt8
from ...costs import Cost, Load, Place, degree, exchange, neighbors
from ...keeping import finite
from ...lanes import New, temporaries
from ...primitives import neighbor_mean_
from ...primitives.compressed import pieces, pieces_of
from ...primitives.neighbors import links, round_of
from ...primitives.transports import exchanged
from ...stages import Stage, State
from ...topology import Topology


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
        """Send Q(change) in pieces, then yield of each piece the bytes sent and those of each neighbour."""
        c = self.compressor
        runs = pieces(x) if c.dense else (slice(0, x.numel()),)  # a sparse one selects from all values
        lengths = [c.row_bytes(run.stop - run.start) for run in runs]
        incoming = {p: [torch.empty(1, b, dtype=torch.uint8, device=x.device) for b in lengths] for p in here.weights}

        def changes() -> Iterator[Tensor]:
            for tag, run in enumerate(runs):
                with temporaries() as new:
                    packed = c.compress(self._change(x[run], here.at(run), new).view(1, -1), key=comm.key(tag))
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
        return self.compressor.decompress(packed, like.numel(), out=new(like).view(1, -1))[0]

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
