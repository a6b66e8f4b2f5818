"""Costs: the measurements of a network, and the model of the time that an exchange of a bucket takes on it.

Each stage declares its cost in these terms, in its method `cost`; `tune` predicts training steps from the costs. A link
is modelled by a straight line: a message of b bytes takes α + β b seconds. For n ranks and S bytes of values:

    a message to each of k neighbours      α + k β b                            all posted together
    all-reduce, a ring                     2 (n − 1) α + 2 (n − 1)/n β S
    all-gather, a ring                     (n − 1) (α + β b)                    b bytes from each rank
    scatter, and gather                    α' + (n − 1) β' b + α + (n − 1) β b  shards of b bytes, each to its owner,
                                                                                and around a ring to all

α' and β' are measured by an all-to-all, whose messages share the network card of a machine or a link between two
sockets. In a ring, each link has one sender. These costs are from Thakur, Rabenseifner and Gropp 2005, "Optimization of
Collective Communication Operations in MPICH".

An exchange takes w seconds on the link; the machine's processor works in u of these w seconds. Compressing, adding and
copying take q seconds. P is the number of pieces that are sent one after another (1 on a GPU):

    z = q + u                          the seconds in which the processor works
    T = m + (q + w − m)/P              the seconds of the exchange; the busier of link and processor takes m = max(w, z)

In the costs of stages, n is the number of ranks, k of neighbours, and N of values. A value has e bytes, N values have
S = N e bytes, and N packed values have row(N) bytes. A copy is a pass that reads and writes each value once.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache
from operator import add
from typing import Annotated, Any, NamedTuple

from torch import Tensor

from .arguments import Declared, Positive, Range, checked, describe
from .buckets import LEAST, MOST, What, local, real
from .compressors import Compressor
from .topology import Topology
from .topology.base import MOST_RANKS

FP32 = 4
SENT, SHARE = 1 << 19, 4  # the fewest bytes that a default bucket sends; its share of the gradients
ROUNDS = 64  # the most rounds of a period that are examined


@dataclass(frozen=True)
class Line(Declared):
    """The cost of a message of b bytes: α + β b seconds; α is `alpha`, and β is `beta`.

    `busy` is the part of β, in seconds per byte, in which the processor of the sending rank works and cannot compute.
    """

    alpha: float
    beta: float
    busy: float = 0.0

    @checked
    def seconds(self, b: float) -> float:
        """Return α + β b, the seconds that a message of b bytes takes."""
        return self.alpha + self.beta * b

    @property
    def rate(self) -> float:
        """Return 1/β in bytes a second; infinite if β is 0."""
        return 1 / self.beta if self.beta else float("inf")


def ring(n: int) -> float:
    """Return 2 (n − 1)/n: the bytes that each rank sends in an all-reduce, per byte of the tensor."""
    return 2 * (n - 1) / n


@dataclass(frozen=True)
class Link(Declared):
    """The cost of messages on the links of one part of a network, over a number of flows.

    Attributes:
        part: "flat" for all ranks; with nodes also "intra" (the ranks of a node) and "inter" (one rank of each node).
            For an exchange in one kernel its name follows, as in "flat: mean", and `exchange` is by bytes of values.
        flows: connections to each peer, as in `Comm(flows=…)`.
        ranks: the number of ranks that exchange on these links together.
        exchange: the `Line` of an exchange in which every rank sends one message to the next rank, and receives one.
        all_reduce: α and β such that 2 (n − 1) α + 2 (n − 1)/n β S is the time of an all-reduce.
        all_to_all: the `Line` of an exchange in which every rank sends to all others; b is the sum of the bytes that
            one rank sends. None: the same as `exchange`.
    """

    part: str
    flows: Positive
    ranks: int
    exchange: Line
    all_reduce: Line
    all_to_all: Line | None = None

    @property
    def to_all(self) -> Line:
        """Return the `Line` of messages to any ranks of this part: `all_to_all`, or else `exchange`."""
        return self.exchange if self.all_to_all is None else self.all_to_all


@dataclass(frozen=True)
class Codec(Declared):
    """The speed of a compressor while all ranks work. `name` is the repr of the compressor.

    `compress` and `decompress` are the seconds per fp32 value. `reduce` is the seconds per value and packed row to
    average packed rows, or with a sparse compressor to add packed rows.
    """

    name: str
    compress: float
    decompress: float
    reduce: float


@dataclass(frozen=True, repr=False)
class Network(Declared):
    """The measurements of `probe`. They are equal on all ranks: each time is that of the slowest rank.

    Attributes:
        ranks, per_node: the number n of ranks, and the number of ranks on each node, or 1 if nodes are not known.
        device, threads: the device of the tensors, "cpu" or "cuda"; the number of torch's threads on each rank.
        links, codecs: a `Link` for each part and number of flows; a `Codec` for each probed compressor.
        copy: seconds to copy a byte.
        launch: seconds to put work on a lane and to get its result.
        crowding: κ, the slowdown of a rank's computation if a second thread (on CUDA a second stream) computes at the
            same time: 0 if each thread has a core, 1 if both share a core.
    """

    ranks: int
    per_node: int
    device: str
    threads: int
    links: tuple[Link, ...]
    codecs: tuple[Codec, ...] = ()
    copy: float = 0.0
    launch: float = 0.0
    crowding: float = 0.0

    @checked
    def link(self, part: str, flows: int = 1) -> Link:
        """Return the link of a part of the network over some flows; raise a ValueError if it has not been measured."""
        found = {(link.part, link.flows): link for link in self.links}
        if (part, flows) not in found:
            known = ", ".join(f"{part} over {flows}" for part, flows in found) or "nothing"
            raise ValueError(
                f"nothing is known of the {part!r} network over {flows} flows, only of {known}; "
                "probe it with flows=(…) and, for nodes, comm=Comm(mesh=…)"
            )
        return found[part, flows]

    def flows(self) -> tuple[int, ...]:
        """Return the numbers of flows that have been measured, in rising order."""
        return tuple(sorted({link.flows for link in self.links})) or (1,)

    @checked
    def codec(self, compressor: Compressor) -> Codec:
        """Return the speed of a compressor; raise a ValueError if it has not been measured."""
        found = {codec.name: codec for codec in self.codecs}
        if (name := repr(compressor)) not in found:
            raise ValueError(f"nothing is known of the speed of {name}; probe it with compressors=[{name}, …]")
        return found[name]

    @checked
    def of(self, ranks: Positive) -> "Network":
        """Return these measurements for another number of ranks, with the same α and β of all links."""
        size = {"flat": ranks, "inter": ranks // self.per_node}
        links = tuple(replace(link, ranks=size.get(link.part, link.ranks)) for link in self.links)
        return replace(self, ranks=ranks, links=links)

    def to_json(self) -> str:
        """Return the measurements as text that `from_json` reads."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    @checked
    def from_json(cls, text: str) -> "Network":
        """Read the text that `to_json` wrote; raise a ValueError for any other text."""

        def part(found: dict[str, Any]) -> Any:
            kind: Any = Line if "beta" in found else Link if "part" in found else Codec if "compress" in found else dict
            return kind(**found)

        try:
            found = json.loads(text, object_hook=part)
            return cls(**found | {name: tuple(found[name]) for name in ("links", "codecs")})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"Network.to_json never wrote text={describe(text)}: {error!r}") from error

    def __str__(self) -> str:
        def gigabytes(seconds: float) -> str:  # of seconds a byte
            return f"{1e-9 / seconds:.2f} GB/s" if seconds else "free"

        nodes = f", {self.per_node} a node" if self.per_node > 1 else ""
        shown = [f"{self.ranks} ranks{nodes}, {self.device}, {self.threads} threads"]
        row = "{:<8}{:>6}{:>6}  {:<12}{:>10}{:>13}{:>6}".format
        shown += [row("link", "flows", "ranks", "exchange", "α", "1/β", "busy")] * bool(self.links)
        for link in self.links:
            place: tuple[Any, ...] = link.part, link.flows, link.ranks
            lines = {"message": link.exchange, "all-reduce": link.all_reduce, "all-to-all": link.to_all}
            lines = {"one kernel": link.exchange} if ":" in link.part else lines
            for name, line in lines.items():
                busy = f"{line.busy / (line.beta or 1):.0%}"
                shown.append(row(*place, name, f"{line.alpha * 1e6:.0f} µs", f"{line.rate / 1e6:.1f} MB/s", busy))
                place = "", "", ""
        row = "{:<32}{:>12}{:>12}{:>12}".format
        shown += [row("compressor", "compress", "decompress", "reduce")] * bool(self.codecs)
        for codec in self.codecs:
            speeds = (codec.compress, codec.decompress, codec.reduce)
            shown.append(row(codec.name, *(gigabytes(seconds / FP32) for seconds in speeds)))
        copying = f"copying {gigabytes(self.copy)}, launching {self.launch * 1e6:.0f} µs"
        return "\n".join([*shown, f"{copying}, a second thread takes {self.crowding:.0%} of the first"])

    __repr__ = __str__


@dataclass(frozen=True)
class Cost(Declared):
    """The cost of one exchange, or of several exchanges one after another.

    Attributes:
        seconds: T, the time of the exchange on a machine that does nothing else.
        busy: z, the seconds of T in which the rank's processor works for the exchange.
        sent: bytes that a rank sends, over all links.
        beside, beside_busy: the parts of `seconds` and `busy` that run on a second lane, in the middle of the exchange.
    """

    seconds: float = 0.0
    busy: float = 0.0
    sent: float = 0.0
    beside: float = 0.0
    beside_busy: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*map(add, astuple(self), astuple(other)))


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
        """Return this load in fp32, or in its own dtype if that is wider."""
        return replace(self, value_bytes=max(FP32, self.value_bytes))


def load_of(params: Sequence[Tensor]) -> Load:
    """Return the load of parameters of the same dtype; of sharded parameters, that of this rank's shards."""
    here = [real(local(p)) for p in params]
    return Load(sum(p.numel() for p in here), here[0].element_size(), tuple(tuple(p.shape) for p in here))


@dataclass(frozen=True)
class Place(Declared):
    """The part of a network that an exchange uses, and its number of flows."""

    network: Network
    part: str = "flat"
    flows: Positive = 1

    @property
    def link(self) -> Link:
        """Return the link of this part over `flows` flows; with nodes, parts other than "inter" have one flow."""
        divided = "inter" if self.network.per_node > 1 else "flat"
        return self.network.link(self.part, self.flows if self.part == divided else 1)

    @property
    def ranks(self) -> int:
        """Return n, the number of ranks on the link."""
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
    def in_one_kernel(self, name: str, b: float, sent: float) -> Cost | None:
        """Return the cost of an exchange of b bytes in one kernel, which sends `sent` bytes; None: not measured."""
        lines = [link.exchange for link in self.network.links if link.part == f"{self.part}: {name}"]
        return replace(exchange(lines[0], 1, b), sent=sent) if lines else None

    @checked
    def messages(self, k: Annotated[int, Range(0, MOST_RANKS)], b: float) -> Cost:
        """Return the cost of a message of b bytes to each of k ≥ 0 neighbours. Any rank may be a neighbour."""
        return exchange(self.link.to_all, min(k, 1), k * b)

    @checked
    def shards(self, b: float, q: float, P: Annotated[int, Range(1, 1 << 40)] = 1) -> Cost:
        """Return the cost of n shards of b bytes: each is sent to its owner, and then around a ring to all ranks.

        Besides, a rank computes for q seconds. The work is cut into P pieces, which are sent one after another.
        """
        each, to, around = (self.ranks - 1) * b, self.link.to_all, self.link.exchange
        w, u = to.seconds(each) + around.seconds(each), (to.busy + around.busy) * each
        return piped(q, w, u, P, 2 * each)


@dataclass(frozen=True)
class Timeless(Network):
    """A network on which nothing takes time: the costs on it tell what is sent, and need no probe."""

    def link(self, part: str, flows: int = 1) -> Link:
        """Return a link of any part of the network, on which messages take no time."""
        ranks = {"intra": self.per_node, "inter": self.ranks // self.per_node}.get(part, self.ranks)
        return Link(part, flows, ranks, Line(0.0, 0.0), Line(0.0, 0.0))

    def codec(self, compressor: Compressor) -> Codec:
        """Return the speed of any compressor, which takes no time."""
        return Codec(repr(compressor), 0.0, 0.0, 0.0)


def piped(q: float, w: float, u: float, P: int = 1, sent: float = 0.0) -> Cost:
    """Return the cost of `sent` bytes: T = m + (q + w − m)/P, z = q + u, m = max(w, z), in the module's letters."""
    z = q + u
    m = max(w, z)
    return Cost(m + (q + w - m) / P, z, sent)


def exchange(line: Line, steps: int, sent: float, q: float = 0.0, P: int = 1) -> Cost:
    """Return the cost of sending `sent` bytes with `steps` latencies, in P pieces, and of q seconds of computing."""
    return piped(q, steps * line.alpha + line.beta * sent, line.busy * sent, P, sent)


def rounds_of(t: Topology, n: int) -> range:
    """Return the rounds of the period of `t` for n ranks; at most `ROUNDS`, since later rounds cost the same."""
    return range(min(t.period(n), ROUNDS))


@lru_cache(maxsize=1024)
def degree(t: Topology, n: int, round: int | None = None) -> int:
    """Return k, the largest number of messages that a rank sends or receives in `round`; None means in any round."""
    if round is None:
        return max(degree(t, n, each) for each in rounds_of(t, n))
    ranks = 1 if "circulant" in t.facts else n
    heard = [[peer for peer in t.weights(rank, n, round) if peer != rank] for rank in range(ranks)]
    sent = Counter(peer for peers in heard for peer in peers)
    return max(*map(len, heard), *([0] if ranks < n else sent.values()), 0)


class Sizes(NamedTuple):
    """The sizes of buckets, in bytes: `most` of them at most; with `least`, buckets are tapered (see `split`)."""

    most: int
    least: int | None = None


def sizes_of(exchanges: Sequence[tuple[Any, Sequence[Tensor]]], bucket_bytes: int | None) -> dict[What, Sizes]:
    """Return the sizes of buckets by what they hold, for pairs of a rule and its parameters. None: the default size.

    Buckets overlap backward, but each costs a delay and the time of processors. So by default, one has a quarter of the
    gradients, and more if it would send fewer than `SENT` bytes: low-rank and sparse gradients need few buckets.
    """
    if bucket_bytes is not None:
        least = LEAST if bucket_bytes > LEAST else None
        return {"grad": Sizes(bucket_bytes, least), "data": Sizes(bucket_bytes)}
    size, sent = 0, 0.0
    for rule, params in exchanges:
        if rule.what == "grad":
            bytes_ = sum(p.nbytes for p in params)
            size += bytes_
            try:
                sent += rule.stage.cost(load_of(params), Place(Timeless(4, 2, "cpu", 1, ()))).sent
            except Exception:  # of a stage without a cost, or whose topology is for other ranks
                sent += ring(4) * bytes_
    least = max(LEAST, min(MOST, int(size * SENT / sent) if sent else MOST))
    return {"grad": Sizes(min(max(size // SHARE, 3 * least // 2), MOST), least), "data": Sizes(MOST)}
