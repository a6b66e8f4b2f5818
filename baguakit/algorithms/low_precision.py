"""Gossip through compressed differences: each rank keeps a replica of its weights that its neighbours know as well.

For r_i the replica of rank i, Q the compressor, W the mixing matrix and x_i the weights after a local step:

    DCD      q_i ← Q(x_i − r_i + (W r)_i − r_i);   r_i ← r_i + q_i;   x_i ← r_i
    CHOCO    q_i ← Q(x_i − r_i);                   r_i ← r_i + q_i;   x_i ← x_i + γ ((W r)_i − r_i)

Only q_i is sent. A rank holds its own r_i and the sum s_i = Σ_{j ≠ i} w_ij r_j, to which w_ij q_j is added as it comes:
two copies of the model whatever the number of neighbours.

CHOCO brings the replicas up to date before it mixes them, so its W may change from round to round: those who hear a
rank in one round of the period have not heard what it sent in the others, and each round has r_i and s_i of its own.
One peer a round is then one message of compressed values, whatever the number of ranks, for 2 ⌈log₂ n⌉ copies.

DCD-PSGD: Tang et al. 2018, arXiv:1803.06443. CHOCO-SGD: Koloskova et al. 2019, arXiv:1902.00340.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..arguments import check_fields, checked, real
from ..buckets import Bucket
from ..comm import Comm
from ..compressors import Compressor, MinMaxUInt8
from ..keeping import finite
from ..lanes import New, temporaries
from ..primitives import neighbor_mean_
from ..primitives.compressed import prepare
from ..primitives.neighbors import links, round_of
from ..primitives.pieces import cut
from ..primitives.wires import letters
from ..rules import Rule, after_step
from ..stages import Stage, State
from ..topology import Ring, Topology

LONGEST = 64  # rounds of a period: of longer ones a rank would remember more than 128 copies of its weights


class Replicas(NamedTuple):
    """The replicas of a rank for one round of the period, and who hears whom in it."""

    r: Tensor  # its own replica
    s: Tensor  # Σ_{j ≠ i} w_ij r_j
    own: float  # w_ii
    weights: dict[int, float]  # w_ij of the others
    targets: tuple[int, ...]  # who hears it

    def at(self, run: slice) -> "Replicas":
        """Those of a piece."""
        return self._replace(r=self.r[run], s=self.s[run])

    def pull(self, new: New) -> Tensor:
        """(W r)_i − r_i: where the neighbours are, seen from here."""
        return torch.add(self.s, self.r, alpha=self.own - 1, out=new(self.r))


@dataclass(frozen=True, repr=False)
class Gossip(Stage):
    """The common part of DCD and CHOCO: replicas, kept up to date by compressed changes."""

    topology: Topology
    compressor: Compressor = MinMaxUInt8()
    elementwise: ClassVar = {"replica": "anew", "neighbors": "anew"}  # Σ over other ranks would be another sum
    follows: ClassVar[tuple[str, ...]] = ("replica", "neighbors")

    def __post_init__(self) -> None:
        check_fields(self)

    def multiple_of(self, comm: Comm) -> int:
        return 64

    def init(self, bucket: Bucket, comm: Comm) -> State:
        """For every round of the period, the replicas are what ranks hold now: they tell it here, uncompressed."""
        prepare(self, bucket.flat, comm)
        x = bucket.flat.to(torch.promote_types(bucket.flat.dtype, torch.float32))
        state: State = {"replica": {}, "neighbors": {}}
        for k in range(self.topology.period(comm.size)):
            own = links(self.topology, comm.rank, comm.size, k)[0][comm.rank]
            state["replica"][str(k)] = x.clone()
            state["neighbors"][str(k)] = neighbor_mean_(x.clone(), self.topology, comm.at(k)).sub_(x, alpha=own)
        return state

    def __call__(self, x: Tensor, state: State, comm: Comm) -> Tensor:
        if comm.size == 1:
            return x
        here = self._replicas(state, comm)
        for run, packed, received in self._exchanged(x, here, comm):
            with temporaries() as new:
                part = here.at(run)
                self._mix_(x[run], part, self._decompressed(packed, part.r, new), received, new)
        return x

    def _change(self, x: Tensor, here: Replicas, new: New) -> Tensor:
        """Return the part of a piece that is compressed and sent."""
        raise NotImplementedError

    def _mix_(self, x: Tensor, here: Replicas, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        """Let the weights and the replicas of a piece take part in q and in what the neighbours sent."""
        raise NotImplementedError

    def _replicas(self, state: State, comm: Comm) -> Replicas:
        """Those of the round that `comm` stands at."""
        k = round_of(self.topology, comm)
        row, targets = links(self.topology, comm.rank, comm.size, k)
        others = {peer: w for peer, w in row.items() if peer != comm.rank}
        return Replicas(state["replica"][str(k)], state["neighbors"][str(k)], row[comm.rank], others, targets)

    def _exchanged(self, x: Tensor, here: Replicas, comm: Comm) -> Iterator[tuple[slice, Tensor, dict[int, Tensor]]]:
        """Send Q(change), piece by piece; then, of each piece, what was sent of it and what each neighbour sent."""
        c = self.compressor
        runs = list(cut(x)) if c.dense else [slice(0, x.numel())]  # top-k is of the whole
        rooms = [c.row_bytes(run.stop - run.start) for run in runs]
        incoming = [{p: torch.empty(1, b, dtype=torch.uint8, device=x.device) for p in here.weights} for b in rooms]
        way, sent = letters(comm, incoming, x.device), []
        for tag, run in enumerate(runs):
            with temporaries() as new:
                change = self._change(x[run], here.at(run), new)
                sent.append(c.compress(change.view(1, -1), key=comm.key(tag)))
            way.send(tag, dict.fromkeys(here.targets, sent[tag]))
        for tag, run in enumerate(runs):
            yield run, sent[tag], way.arrived(tag)
        way.close()

    def _decompressed(self, packed: Tensor, like: Tensor, new: New) -> Tensor:
        """Return a piece of changes as it was sent."""
        return self.compressor.decompress(packed, like.numel(), out=new(like).view(1, -1))[0]

    def _follow(self, here: Replicas, q: Tensor, received: dict[int, Tensor], new: New) -> None:
        """Let every replica change by what its rank sent: this one by q, the neighbours by what was received.

        A change that is not finite is added to no replica, neither here nor where it arrives: all judge by its bytes.
        """
        here.r.add_(kept(q))
        for peer, packed in received.items():
            here.s.add_(kept(self._decompressed(packed, q, new)), alpha=here.weights[peer])


def kept(q: Tensor) -> Tensor:
    """q where all of it is finite, else nothing."""
    whole = finite(q)
    if whole.is_cpu:  # to ask waits for nothing
        return q if whole else torch.zeros_like(q)
    return torch.where(whole, q, 0.0)


@dataclass(frozen=True, repr=False)
class DifferenceCompression(Gossip):
    """DCD:  q ← Q(x − r + W r − r);  r ← r + q;  x ← r."""

    def check(self, comm: Comm) -> None:
        self.topology.check(comm.size)
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
def low_precision_decentralized(
    topology: Topology = Ring(), compressor: Compressor = MinMaxUInt8(), every: int = 1
) -> Rule:
    """Decentralized SGD that sends compressed differences (DCD): a quarter of the bytes of `decentralized` in fp32.

    Args:
        topology: static, symmetric and doubly stochastic. Sends a message to each neighbour; `choco` takes one that
            changes, and then sends to one peer a round.
        compressor: exact enough that its error shrinks with what it compresses, such as MinMaxUInt8.
        every: exchange only after every so many steps.

    Raises:
        TypeError: `topology` is not a topology, or `compressor` not a compressor.
        ValueError: `every` is less than 1; from `attach`, the topology changes or is not symmetric.
    """
    return after_step(DifferenceCompression(topology, compressor), every=every)


@checked
def choco(
    topology: Topology = Ring(), compressor: Compressor = MinMaxUInt8(), gamma: float = 0.5, every: int = 1
) -> Rule:
    """Decentralized SGD with any compressor (CHOCO): what gossip moves, the mean over ranks does not notice.

    The fewest bytes of all that gossip: `choco(OnePeerExact(), gamma=1.0)` sends one message a step, a byte for each
    weight, where `bytegrad` sends 2 (n − 1)/n.

    Args:
        topology: doubly stochastic; it may change from round to round, and remembers two copies of the weights for
            each round of its period.
        compressor: however coarse; the coarser, the smaller must gamma be.
        gamma: the share of the way to the neighbours that a rank goes in each step; 1 with no compression is ATC. With
            TopK(0.05) begin at 0.3; a `consensus_distance()` that keeps growing says that it is too large.
        every: exchange only after every so many steps.

    Raises:
        TypeError: `topology` is not a topology, or `compressor` not a compressor.
        ValueError: `gamma` is not in (0, 1], or `every` less than 1; from `attach`, the topology's matrices are not
            doubly stochastic, or its period is longer than 64 rounds.
    """
    return after_step(Choco(topology, compressor, gamma=gamma), every=every)
