"""Results that others published, in images a second, and the model's inputs for them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .model import (
    Algorithm,
    Cluster,
    Training,
    by_nodes,
    compressed,
    decentralized,
    free_running,
    low_precision,
    one_peer,
    one_peer_by_nodes,
    one_ring,
    throughput,
)

VGG16 = Training(138_357_544, 32, 32 / (29_300 / 128))  # a rank alone: the chart's linear line
NCCL, BAGUA_NET = 2 * 1.75e9, 2 * 2.8e9  # nccl-tests divide by the time of an all-reduce, which sends everything twice
TCP_100 = Cluster(beta=NCCL, alpha=30e-6)
TCP_10 = Cluster(beta=1.25e9, alpha=30e-6)


@dataclass(frozen=True)
class Published:
    """A bar of a chart: whose, how high, and what of the model stands beside it."""

    name: str
    value: float
    algorithm: Algorithm
    cluster: Cluster
    training: Training
    nodes: int = 16


def _bagua(values: Sequence[float], nccl: Cluster, own: Cluster) -> list[Published]:
    bars: list[tuple[str, Algorithm, Cluster]] = [
        ("PyTorch DDP", one_ring, nccl),
        ("Horovod", one_ring, nccl),
        ("Bagua AllReduce", by_nodes, own),
        ("Bagua Decentralized", decentralized, own),
        ("Bagua Low-prec. decentralized", low_precision, own),
        ("Bagua QAdam", compressed, own),
        ("Bagua ByteGrad", compressed, own),
        ("Bagua Async", free_running, own),
    ]
    once = replace(VGG16, messages=1)  # at 2 · 127 messages of α each, NCCL's tree and chunks would be slandered
    return [Published(name, v, f, c, once) for (name, f, c), v in zip(bars, values, strict=True)]


BAGUA = {
    "100 Gb/s": _bagua(
        [8880, 9690, 12300, 13660, 15900, 18880, 21800, 28880], TCP_100, replace(TCP_100, beta=BAGUA_NET)
    ),
    "10 Gb/s": _bagua([4530, 4470, 4470, 4720, 16030, 17830, 19690, 28940], TCP_10, TCP_10),
}

TCP_25 = Cluster(beta=3.125e9, alpha=120e-6)
_BLUEFOG = {
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
THEIRS: dict[str, Algorithm] = {"Horovod": one_ring, "H_N_AR": one_peer_by_nodes, "N_AR": one_peer}


def _bluefog(batch: int) -> list[Published]:
    linear, bars = _BLUEFOG[batch]
    training = Training(25_557_032, batch, batch / (linear / 128), messages=3)  # 102 MB in Horovod's buffers of 64
    return [
        Published(name, value, THEIRS[name], TCP_25, training, nodes)
        for name, values in bars.items()
        for nodes, value in zip((2, 4, 8, 16), values, strict=True)
    ]


BLUEFOG = {batch: _bluefog(batch) for batch in _BLUEFOG}


def band(p: Published) -> tuple[float, float]:
    """Images a second without overlap and with all of it."""
    return (
        throughput(p.algorithm, p.training, p.cluster, p.nodes, 0.0),
        throughput(p.algorithm, p.training, p.cluster, p.nodes, 1.0),
    )


def report() -> str:
    """Published and model side by side."""
    lines = [f"{'':<16}{'':<32}{'published':>10}{'no overlap':>12}{'overlap':>10}"]
    for where, bars in [*BAGUA.items(), *((f"batch {batch}", bars) for batch, bars in BLUEFOG.items())]:
        for bar in bars:
            low, high = band(bar)
            name = bar.name if bar.nodes == 16 else f"{bar.name}, {8 * bar.nodes} GPUs"
            lines.append(f"{where:<16}{name:<32}{bar.value:>10,.0f}{low:>12,.0f}{high:>10,.0f}")
    return "\n".join(lines)
