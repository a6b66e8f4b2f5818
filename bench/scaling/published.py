"""Results that others published, in images a second, and the planner's inputs for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import baguakit as bk
from baguakit.stages import Hierarchical, NeighborMean
from baguakit.topology import FullyConnected, OnePeerExponential
from baguakit.tune import Line, Network

from .model import Algorithm, Training, cluster, codec, throughput

a, by_nodes = bk.algorithms, bk.hierarchical
VGG16 = Training(138_357_544, 32, 32 / (29_300 / 128))  # a rank alone: the chart's linear line
NCCL, BAGUA_NET = 2 * 1.75e9, 2 * 2.8e9  # nccl-tests divide by the time of an all-reduce, which sends everything twice
NVLINK, KERNELS, GPUS = 60e9, 0.7e12, 8  # bytes a second of a GPU's link and of its kernels; GPUs of a node


def v100(nodes: int, rate: float, alpha: float, senders: int | None = None) -> Network:
    """Describe nodes of 8 V100 whose leader averages within the node first and tells it afterwards.

    That sends twice as much within a node as shards do, and the leader compresses for all of it.
    """
    within = Line(0.0, 2 / NVLINK)
    return cluster(nodes, GPUS, Line(alpha, 1 / rate), within, [codec(KERNELS / GPUS)], senders)


@dataclass(frozen=True)
class Published:
    """A bar of a chart: whose, how high, and what of the planner stands beside it."""

    name: str
    value: float
    algorithm: Algorithm
    network: Network
    training: Training

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return self.network.ranks // GPUS

    def band(self) -> tuple[float, float]:
        """Return images a second without overlap and with all of it."""
        low, high = (throughput(self.algorithm, self.training, self.network, overlap) for overlap in (0.0, 1.0))
        return low, high


def _bagua(values: Sequence[float], nccl: float, own: float) -> list[Published]:
    bars: list[tuple[str, Algorithm, float]] = [
        ("PyTorch DDP", a.gradient_allreduce(), nccl),
        ("Horovod", a.gradient_allreduce(), nccl),
        ("Bagua AllReduce", by_nodes(a.gradient_allreduce()), own),
        ("Bagua Decentralized", by_nodes(a.decentralized(FullyConnected())), own),
        ("Bagua Low-prec. decentralized", by_nodes(a.low_precision_decentralized()), own),
        ("Bagua QAdam", by_nodes(a.qadam()), own),
        ("Bagua ByteGrad", by_nodes(a.bytegrad()), own),
        ("Bagua Async", a.async_model_average(), own),
    ]
    return [Published(name, v, f, v100(16, r, 30e-6), VGG16) for (name, f, r), v in zip(bars, values, strict=True)]


BAGUA = {
    "100 Gb/s": _bagua([8880, 9690, 12300, 13660, 15900, 18880, 21800, 28880], NCCL, BAGUA_NET),
    "10 Gb/s": _bagua([4530, 4470, 4470, 4720, 16030, 17830, 19690, 28940], 1.25e9, 1.25e9),
}

THEIRS: dict[str, Algorithm] = {
    "Horovod": a.gradient_allreduce(),
    "H_N_AR": bk.during_backward(Hierarchical(NeighborMean(OnePeerExponential()))),
    "N_AR": a.decentralized(OnePeerExponential()),  # one GPU of a node sends to another node, the others within
}
_BLUEFOG: dict[int, tuple[float, dict[str, Sequence[float]]]] = {
    64: (
        44_900,
        {
            "Horovod": (5203, 9756, 17344, 30136),
            "H_N_AR": (5095, 10190, 20271, 40650),
            "N_AR": (5420, 10732, 21247, 43035),
        },
    ),
    32: (
        40_000,
        {
            "Horovod": (3822, 5414, 10350, 14729),
            "H_N_AR": (3503, 6927, 14013, 27946),
            "N_AR": (4538, 8758, 16561, 32882),
        },
    ),
}


def _bluefog(batch: int) -> list[Published]:
    linear, bars = _BLUEFOG[batch]
    found = []
    for name, values in bars.items():
        # Of 102 MB, in Horovod's buffers of 64: two that it fills, and the rest of a cycle.
        training = Training(25_557_032, batch, batch / (linear / 128), messages=3 if name == "Horovod" else 1)
        for nodes, value in zip((2, 4, 8, 16), values, strict=True):
            network = v100(nodes, 3.125e9, 120e-6, senders=1)
            found.append(Published(name, value, THEIRS[name], network, training))
    return found


BLUEFOG = {batch: _bluefog(batch) for batch in _BLUEFOG}


def report() -> str:
    """Return published figures and the planner's side by side."""
    lines = [f"{'':<16}{'':<32}{'published':>10}{'no overlap':>12}{'overlap':>10}"]
    for where, bars in [*BAGUA.items(), *((f"batch {batch}", bars) for batch, bars in BLUEFOG.items())]:
        for bar in bars:
            low, high = bar.band()
            name = bar.name if bar.nodes == 16 else f"{bar.name}, {GPUS * bar.nodes} GPUs"
            lines.append(f"{where:<16}{name:<32}{bar.value:>10,.0f}{low:>12,.0f}{high:>10,.0f}")
    return "\n".join(lines)
