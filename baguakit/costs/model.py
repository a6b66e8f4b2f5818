"""The model of one exchange of a bucket: seconds of the link, seconds of the machine, bytes sent.

For w seconds on the link, u of them work of this machine's processor as well, q seconds of compressing, adding and
copying, and P pieces that follow each other through both:

    z = q + u                          the machine's own work
    T = m + (q + w − m)/P              with m = max(w, z): the busier of the two, and one piece on the other

For one piece T is q + w, one after the other. On a GPU P is 1.

Letters of the stages' costs: N values of e bytes, S = N e; n ranks; k neighbours; row(N) bytes of N packed values.
Copies are counted in passes over the values, a read and a write each, as the stages make them.
"""

from collections import Counter
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from operator import add

from ..arguments import check_fields, checked, integer
from ..topology import Topology
from .lines import Line, neighbors
from .network import Link, Network

FP32 = 4
ROUNDS = 64  # of a period that are looked at


@dataclass(frozen=True)
class Cost:
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

    def __post_init__(self) -> None:
        check_fields(self)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(add, astuple(self), astuple(other)))

    def put_beside(self) -> "Cost":
        """Return the same cost, all of it on the second lane."""
        return replace(self, beside=self.seconds, beside_busy=self.busy)


@dataclass(frozen=True)
class Load:
    """The tensors of an exchange: their number of `values`, the `value_bytes` of each value, and their `shapes`."""

    values: int
    value_bytes: int = FP32
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

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
class Place:
    """The part of a network that an exchange uses, and its number of flows."""

    network: Network
    part: str = "flat"
    flows: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
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
    """Return the rounds of a period; of a long one the first `ROUNDS`, which are as costly."""
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
