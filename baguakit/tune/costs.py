"""The cost of one flight of a stage: seconds of the link, seconds of the machine, bytes sent.

For w seconds on the link, u of them work of this machine's processor as well, q seconds of compressing, adding and
copying, and P pieces that follow each other through both:

    z = q + u                          the machine's own work
    T = m + (q + w − m)/P              with m = max(w, z): the busier of the two, and one piece on the other

which for one piece is q + w, one after the other. N values of e bytes, S = N e; n ranks; row(N) packed bytes of a row.

    stage                    w                                          q, beside copies                        P
    Mean                     all-reduce of S                                                                    1
    CompressedMean(c)        scattered and gathered, row(N/n)           N (compress + reduce + decompress)      1 to 8
      if small               row(N) to each of the others               N (compress + n decompress)             1
    SparseMean(c)            all-gather of row(N)                       N (compress + n add)                    1
    NeighborMean(t)          S to each neighbour, the mean of a period                                          1
    Hierarchical(inner)      scattered and gathered in the node, and the inner stage on S/L between nodes

On a GPU P is 1. Copies are counted in passes over the values, a read and a write each, as the stages make them.
"""

from dataclasses import dataclass, replace
from functools import singledispatch

from ..arguments import check_fields, checked, shown, whole
from ..compressors import Compressor
from ..primitives.compressed import in_one_hop, pays
from ..primitives.neighbors import is_mean
from ..primitives.pieces import pieces_of
from ..stages import CompressedMean, ErrorFeedback, Hierarchical, Mean, NeighborMean, SparseMean, Stage
from ..topology import Topology
from .lines import all_gather, all_reduce, neighbors, ring, scatter_gather
from .network import Link, Network

FP32 = 4


@dataclass(frozen=True)
class Cost:
    """Of one flight, or of several one after another.

    Attributes:
        seconds: T, on a machine that does nothing else.
        busy: z, seconds of the machine's own work among or beside them.
        sent: bytes that a rank sends, over all links.
    """

    seconds: float = 0.0
    busy: float = 0.0
    sent: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.seconds + other.seconds, self.busy + other.busy, self.sent + other.sent)


@dataclass(frozen=True)
class Load:
    """The tensors of a flight: so many `values`, of `value_bytes` each, and the `shapes` that they make up."""

    values: int
    value_bytes: int = FP32
    shapes: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def size(self) -> int:
        """S, bytes."""
        return self.values * self.value_bytes


@dataclass(frozen=True)
class Place:
    """Where it flies: a part of a network, over so many flows."""

    network: Network
    part: str = "flat"
    flows: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        whole("flows", self.flows, 1)

    @property
    def link(self) -> Link:
        """The link of the part; over one flow where flows make no difference, which with nodes is within them."""
        nodes = self.network.per_node > 1
        divided = "inter" if nodes else "flat"
        return self.network.link(self.part, self.flows if self.part == divided else 1)

    @property
    def ranks(self) -> int:
        """n."""
        return self.link.ranks if self.network.ranks > 1 else 1

    @checked
    def copies(self, passes: float, S: float) -> Cost:
        """So many passes over S bytes."""
        q = passes * S * self.network.copy
        return Cost(q, q)


def piped(q: float, w: float, u: float, P: int = 1) -> Cost:
    """T = m + (q + w − m)/P,  m = max(w, q + u);  see this module."""
    z = q + u
    m = max(w, z)
    return Cost(m + (q + w - m) / P, z)


@singledispatch
@checked
def cost(stage: Stage, load: Load, place: Place) -> Cost:
    """Return the cost of one flight of a stage.

    `cost.register` teaches it stages of your own:

        @bk.tune.cost.register
        def _(stage: MyStage, load: bk.tune.Load, place: bk.tune.Place) -> bk.tune.Cost: ...

    Raises:
        TypeError: the stage is not known.
    """
    raise TypeError(
        f"what stage {shown(stage)} costs is not known; teach it: @bk.tune.cost.register on a function of "
        f"(stage: {type(stage).__name__}, load, place) that returns a bk.tune.Cost"
    )


@cost.register
@checked
def _(stage: Mean, load: Load, place: Place) -> Cost:
    if place.ranks == 1:
        return Cost()
    n, S, line = place.ranks, load.size, place.link.all_reduce
    sent = ring(n) * S
    flown = piped(0.0, all_reduce(line, n, S), line.busy * sent)
    return place.copies(1, S) + replace(flown, sent=sent)


@cost.register
@checked
def _(stage: CompressedMean, load: Load, place: Place) -> Cost:
    return compressed_mean(stage.compressor, load, place)


def compressed_mean(c: Compressor, load: Load, place: Place) -> Cost:
    """Codes: sent to all if few, else scattered, averaged and gathered in pieces; values where codes are no shorter."""
    n, N = place.ranks, load.values
    if n == 1 or not pays(N, load.value_bytes, c, n):
        return cost(Mean(), load, place)
    line, speed = place.link.exchange, place.network.codec(c)
    if in_one_hop(N, c, n):
        b = c.row_bytes(N)
        sent = (n - 1) * b
        q = N * (speed.compress + n * speed.decompress)
        return replace(piped(q, neighbors(line, n - 1, b), line.busy * sent), sent=sent)
    P = pieces_of(N, place.network.device == "cuda")
    b = c.row_bytes(-(-N // n))
    sent = 2 * (n - 1) * b
    q = N * (speed.compress + speed.reduce + speed.decompress)
    return replace(piped(q, scatter_gather(line, n, b), line.busy * sent, P), sent=sent)


@cost.register
@checked
def _(stage: SparseMean, load: Load, place: Place) -> Cost:
    n, N, c = place.ranks, load.values, stage.compressor
    if n == 1:
        return Cost()
    line, speed, b = place.link.exchange, place.network.codec(c), c.row_bytes(N)
    sent = (n - 1) * b
    q = N * (speed.compress + n * speed.reduce)
    return replace(piped(q, all_gather(line, n, b), line.busy * sent), sent=sent)


@cost.register
@checked
def _(stage: NeighborMean, load: Load, place: Place) -> Cost:
    return neighbor_mean(stage.topology, load, place)


def neighbor_mean(t: Topology, load: Load, place: Place) -> Cost:
    """The mean over the rounds of a period; a round that is the exact mean is an all-reduce."""
    n, S = place.ranks, load.size
    if n == 1:
        return Cost()
    total, rounds = Cost(), range(t.period(n))
    for round in rounds:
        if is_mean(t, n, round):
            total += cost(Mean(), load, place)
        else:
            k = degree(t, n, round)
            total += messages(k, S, place) + place.copies((k + 2) / 2, S)
    return Cost(*(each / len(rounds) for each in (total.seconds, total.busy, total.sent)))


def degree(t: Topology, n: int, round: int) -> int:
    """k, the most messages that a rank sends or receives in a round."""
    heard = [[peer for peer in t.weights(rank, n, round) if peer != rank] for rank in range(n)]
    told = [sum(rank in peers for peers in heard) for rank in range(n)]
    return max(*map(len, heard), *told)


def messages(k: int, b: float, place: Place) -> Cost:
    """A message of b bytes to each of k neighbours."""
    line = place.link.exchange
    return replace(piped(0.0, neighbors(line, k, b), line.busy * k * b), sent=k * b)


@cost.register
@checked
def _(stage: ErrorFeedback, load: Load, place: Place) -> Cost:
    if place.ranks == 1:
        return cost(stage.inner, load, place)
    return cost(stage.inner, replace(load, value_bytes=FP32), place) + place.copies(5, FP32 * load.values)


@cost.register
@checked
def _(stage: Hierarchical, load: Load, place: Place) -> Cost:
    inside, between = replace(place, part="intra"), replace(place, part="inter")
    L = inside.ranks
    shard = Load(-(-load.values // L), load.value_bytes)
    if L == 1:
        return place.copies(1, load.size) + cost(stage.inner, shard, between)
    line = inside.link.exchange
    b, sent = shard.size, 2 * (L - 1) * shard.size
    within = replace(piped(0.0, 2 * all_gather(line, L, b), line.busy * sent), sent=sent)
    return within + place.copies(3, load.size) + cost(stage.inner, shard, between)
