"""Clusters, training, and what exchanges take; see `bench.scaling`."""

from collections.abc import Callable
from dataclasses import dataclass

from baguakit.costs import all_reduce, neighbors, scatter_gather
from baguakit.costs.overlap import overlapped
from baguakit.tune import Cost, Line

CODEC_BYTES = 12  # a value, read and written by a compressed mean


@dataclass(frozen=True)
class Cluster:
    """Machines and their network; bytes per second and seconds.

    Attributes:
        per_node: g, GPUs of a node.
        alpha: α, the latency of a message between nodes.
        beta: β, of a node's interface, each way, as large messages see it.
        beta_intra: β_nv, of a GPU's link within the node.
        codec: bytes that compressing or decompressing reads and writes in a second.
        packed: c(S)/S, for 8 bits of fp32 with their ranges.
    """

    per_node: int = 8
    alpha: float = 50e-6
    beta: float = 12.5e9
    beta_intra: float = 60e9
    codec: float = 0.7e12
    packed: float = 0.254

    @property
    def between(self) -> Line:
        """A node's interface."""
        return Line(self.alpha, 1 / self.beta)

    @property
    def within(self) -> Line:
        """A GPU's link within the node, whose latency is left out."""
        return Line(0.0, 1 / self.beta_intra)


@dataclass(frozen=True)
class Training:
    """A model as one rank trains it: values, images a step, and seconds of forward and backward alone."""

    values: int
    batch: int
    seconds: float
    forward_share: float = 1 / 3
    messages: int = 8

    @property
    def size(self) -> float:
        """S, bytes in fp32."""
        return 4.0 * self.values

    @property
    def forward(self) -> float:
        """t_f."""
        return self.seconds * self.forward_share

    @property
    def backward(self) -> float:
        """t_b."""
        return self.seconds - self.forward


@dataclass(frozen=True)
class Exchange:
    """The seconds that an exchange takes, and how many of them computation can hide."""

    seconds: float
    hides: float


Algorithm = Callable[[Training, Cluster, int], Exchange]


def intra(t: Training, c: Cluster) -> float:
    """Averaging within a node before the exchange, and telling all of it afterwards."""
    return 2 * all_reduce(c.within, c.per_node, t.size)


def codec(t: Training, c: Cluster) -> float:
    """Compressing S, averaging the codes of shards and decompressing S: 5, 2 and 5 bytes a value."""
    return CODEC_BYTES * t.values / c.codec


def one_ring(t: Training, c: Cluster, m: int) -> Exchange:
    """All-reduce as NCCL and Horovod do it over all ranks; a ring enters and leaves a node once."""
    M = t.messages
    return Exchange(M * all_reduce(c.between, m * c.per_node, t.size / M), t.backward)


def by_nodes(t: Training, c: Cluster, m: int) -> Exchange:
    """All-reduce within nodes and between their leaders."""
    return Exchange(intra(t, c) + all_reduce(c.between, m, t.size), t.backward)


def compressed(t: Training, c: Cluster, m: int) -> Exchange:
    """ByteGrad, QAdam: scattered and gathered in 8 bits between leaders."""
    wire = scatter_gather(c.between, m, c.packed * t.size / m)
    return Exchange(intra(t, c) + wire + codec(t, c), t.backward)


def decentralized(t: Training, c: Cluster, m: int) -> Exchange:
    """Bagua's: leaders average the weights while forward and backward run."""
    return Exchange(by_nodes(t, c, m).seconds, t.seconds)


def low_precision(t: Training, c: Cluster, m: int, peers: int = 2) -> Exchange:
    """Differences in 8 bits to two neighbours, after the step."""
    return Exchange(intra(t, c) + neighbors(c.between, peers, c.packed * t.size) + codec(t, c), 0.0)


def low_precision_one_peer(t: Training, c: Cluster, m: int) -> Exchange:
    """Differences in 8 bits to one node, which is another in each round, after the step."""
    return low_precision(t, c, m, peers=1)


def one_peer(t: Training, c: Cluster, m: int) -> Exchange:
    """One rank of a node sends its weights to one of another, while forward and backward run."""
    return Exchange(neighbors(c.between, 1, t.size), t.seconds)


def one_peer_by_nodes(t: Training, c: Cluster, m: int) -> Exchange:
    """The mean of a node to one other node."""
    return Exchange(intra(t, c) + neighbors(c.between, 1, t.size), t.backward)


def local_steps(t: Training, c: Cluster, m: int, every: int = 8) -> Exchange:
    """An all-reduce by nodes after every `every` steps."""
    return Exchange(by_nodes(t, c, m).seconds / every, 0.0)


def free_running(t: Training, c: Cluster, m: int) -> Exchange:
    """Nobody waits."""
    return Exchange(0.0, 0.0)


def throughput(algorithm: Algorithm, t: Training, c: Cluster, m: int, overlap: float = 1.0) -> float:
    """Images a second of m nodes, with so much of the possible overlap."""
    flight = algorithm(t, c, m)
    step = overlapped(t.seconds, [(t.seconds - overlap * flight.hides, Cost(flight.seconds))])
    return m * c.per_node * t.batch / step
