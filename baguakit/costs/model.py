"""The model of one exchange of a bucket, and of the overlap of exchanges with computation.

For w seconds on the link, u of them work of this machine's processor as well, q seconds of compressing, adding and
copying, and P pieces that follow each other through both:

    z = q + u                          the machine's own work
    T = m + (q + w − m)/P              with m = max(w, z): the busier of the two, and one piece on the other

For one piece T is q + w, one after the other. On a GPU P is 1.

Letters of the stages' costs: N values of e bytes, S = N e; n ranks; k neighbours; row(N) bytes of N packed values.
Copies are counted in passes over the values, a read and a write each, as the stages make them.

Overlap: training computes for W seconds. Flight i is launched when r_i of them are done, and takes T_i seconds, z_i of
them work of the machine's processor, in order on one lane; or T_i − B_i there and B_i on a lane beside it (see
`baguakit.lanes`):

    this lane           a_1     a_2  c_1     a_3  c_2   …     a_i = c_i = (T_i − B_i)/2
    the one beside           b_1        b_2                   b_i = B_i

While training and flights run they share the processor, by the crowding κ: with ρ the sum of z/T, the shares that are
work of the processor, of what flies at that time,

    the flights run at the rate     s = min(1, (1 − κ/2)/ρ)       their full rate, up to half of one core
    training runs at the rate       1 − κ ρ s

Without crowding (κ = 0) and on one lane flight i lands at c_i = max(r_i, c_{i−1}) + T_i, and the step ends at
max(W, c_last). Many equal flights on two lanes take the longer of Σ (T − B) and Σ B, and the rest of one flight.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import InitVar, astuple, dataclass, replace
from functools import lru_cache
from operator import add

from ..arguments import Declared, checked, integer
from ..topology import Topology
from .network import Line, Link, Network, neighbors

FP32 = 4
ROUNDS = 64  # most rounds of a period that are examined


@dataclass(frozen=True)
class Cost(Declared):
    """The cost of one exchange, or of several one after another.

    Attributes:
        seconds: T, on a machine that does nothing else.
        busy: z, seconds of the machine's own work among or beside them.
        sent: bytes that a rank sends, over all links.
        beside, beside_busy: the seconds and busy seconds among these that are on a second lane; half of the others are
            before them, and half after.
    """

    seconds: float = 0.0
    busy: float = 0.0
    sent: float = 0.0
    beside: float = 0.0
    beside_busy: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(add, astuple(self), astuple(other)))

    def put_beside(self) -> "Cost":
        """Return the same cost, all of it on the second lane."""
        return replace(self, beside=self.seconds, beside_busy=self.busy)


@dataclass(frozen=True)
class Load(Declared):
    """The tensors of an exchange: their number of `values`, the `value_bytes` of each value, and their `shapes`."""

    values: int
    value_bytes: int = FP32
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def size(self) -> int:
        """Return S, the bytes of all values."""
        return self.values * self.value_bytes

    @property
    def fp32(self) -> "Load":
        """Return the same values in fp32."""
        return Load(self.values, FP32, self.shapes)

    @property
    def at_least_fp32(self) -> "Load":
        """Return the same values in fp32, or in their own dtype if that is wider."""
        return Load(self.values, max(FP32, self.value_bytes), self.shapes)


@dataclass(frozen=True)
class Place(Declared):
    """The part of a network that an exchange uses, and its number of flows."""

    network: Network
    part: str = "flat"
    flows: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("flows", self.flows, 1)

    @property
    def link(self) -> Link:
        """Return the link of the part; over one flow if the part is not divided into flows (within a node)."""
        divided = "inter" if self.network.per_node > 1 else "flat"
        return self.network.link(self.part, self.flows if self.part == divided else 1)

    @property
    def ranks(self) -> int:
        """Return n."""
        return self.link.ranks if self.network.ranks > 1 else 1

    @property
    def gpu(self) -> bool:
        """Return whether the tensors are on a GPU."""
        return self.network.device == "cuda"

    @checked
    def copies(self, passes: float, S: float) -> Cost:
        """Return the cost of `passes` copies of S bytes."""
        q = passes * S * self.network.copy
        return Cost(q, q)

    @checked
    def messages(self, k: int, b: float) -> Cost:
        """Return the cost of a message of b bytes to each of k neighbours, 0 or more, which may be any ranks."""
        integer("k", k, 0)
        line = self.link.to_all
        return exchange(line, neighbors(line, k, b), k * b)

    @checked
    def shards(self, b: float, q: float, P: int = 1) -> Cost:
        """Return the cost of n shards of b bytes, each sent to its owner and from it, around a ring, to all ranks.

        Args:
            b: bytes of a shard.
            q: seconds of computing.
            P: pieces that follow each other.
        """
        each, to, around = (self.ranks - 1) * b, self.link.to_all, self.link.exchange
        w, u = to.seconds(each) + around.seconds(each), (to.busy + around.busy) * each
        return piped(q, w, u, P, 2 * each)


def piped(q: float, w: float, u: float, P: int = 1, sent: float = 0.0) -> Cost:
    """Return the cost T = m + (q + w − m)/P,  m = max(w, q + u);  see this module."""
    z = q + u
    m = max(w, z)
    return Cost(m + (q + w - m) / P, z, sent)


def exchange(line: Line, w: float, sent: float, q: float = 0.0, P: int = 1) -> Cost:
    """Return the cost of `sent` bytes that take w seconds on a line, in P pieces, with q seconds of computing."""
    return piped(q, w, line.busy * sent, P, sent)


def rounds_of(t: Topology, n: int) -> range:
    """Return the rounds of a period, at most the first `ROUNDS`: later rounds cost the same."""
    return range(min(t.period(n), ROUNDS))


@lru_cache(maxsize=1024)
def degree(t: Topology, n: int, round: int | None = None) -> int:
    """Return k, the most messages that a rank sends or receives in a round; None means in any round."""
    if round is None:
        return max(degree(t, n, each) for each in rounds_of(t, n))
    ranks = 1 if "circulant" in t.facts else n
    heard = [[peer for peer in t.weights(rank, n, round) if peer != rank] for rank in range(ranks)]
    sent = Counter(peer for peers in heard for peer in peers)
    return max(*map(len, heard), *([0] if ranks < n else sent.values()), 0)


@dataclass(eq=False)
class Phase:
    """A flight, or a phase of one: its remaining seconds, ρ, the training before it, and the phase before it."""

    left: float
    busy: InitVar[float]
    training: float = 0.0
    before: "Phase | None" = None

    def __post_init__(self, busy: float) -> None:
        self.rho, self.over = busy / self.left if self.left else 0.0, False


def overlapped(W: float, flights: Sequence[tuple[float, Cost]], kappa: float = 0.0) -> float:
    """Return the seconds until W seconds of training and all flights are over; see this module.

    Args:
        W: seconds of training.
        flights: of each the seconds of training before its launch, in rising order, and its cost.
        kappa: κ.
    """
    t, x = 0.0, 0.0  # the time, and the seconds of W that are done
    lanes = lanes_of(flights, W)
    while heads := [lane[0] for lane in lanes if lane]:
        flying = [each for each in heads if each.training <= x and (each.before is None or each.before.over)]
        rho = sum(each.rho for each in flying)
        s = min(1.0, (1 - kappa / 2) / rho) if rho and x < W else 1.0
        pace = 1 - kappa * rho * s
        until = min([W, *(each.training for each in heads if each.training > x)])
        training = [(until - x) / pace] if x < W else []
        seconds = min([*(each.left / s for each in flying), *training])
        x = until if training == [seconds] else min(W, x + seconds * pace)
        t += seconds
        for each in flying:
            each.over = each.left / s <= seconds
            each.left -= seconds * s
        for lane in lanes:
            if lane and lane[0].over:
                lane.popleft()
    return t + max(0.0, W - x)


def lanes_of(flights: Sequence[tuple[float, Cost]], W: float) -> tuple[deque[Phase], deque[Phase]]:
    """Return the work of two lanes in order."""
    lane, beside = deque[Phase](), deque[Phase]()
    last: list[Phase] = []  # the last phase of the flight before, which is not due yet
    for r, flight in flights:
        rest, busy = flight.seconds - flight.beside, flight.busy - flight.beside_busy
        if not flight.beside:
            lane.extend([*last, Phase(rest, busy, min(r, W))])
            last = []
            continue
        first = Phase(rest / 2, busy / 2, min(r, W))
        between = Phase(flight.beside, flight.beside_busy, before=first)
        lane.extend([first, *last])
        beside.append(between)
        last = [Phase(rest / 2, busy / 2, before=between)]
    lane.extend(last)
    return lane, beside
