"""Past one machine, on paper: an α–β model of a training step, beside what others published, and up to 1,024 ranks.

    python -m bench.scaling [--measured scaling.json] [--out FOLDER]

A message of b bytes takes α + b/β. A node has g GPUs and one network interface that they share; there are m nodes and
n = m g ranks; S is the model in fp32, c(S) packed; t_f and t_b are a rank's forward and backward.

    exchange                          seconds                                                       overlaps
    all-reduce, one ring              M 2(n−1) α + 2(n−1)/n S/β                                     t_b
    all-reduce, by nodes              intra + 2(m−1) α + 2(m−1)/m S/β                               t_b
    compressed, by nodes              intra + 2 α + 2(m−1)/m c(S)/β + codec                         t_b
    decentralized, all leaders        intra + 2(m−1) α + 2(m−1)/m S/β                               t_f + t_b
    low-precision, ring of leaders    intra + 2 α + 2 c(S)/β + codec                                nothing
    one peer                          α + S/β                                                       t_f + t_b
    one peer, by nodes                intra + α + S/β                                               t_b
    local steps, every H              1/H of an all-reduce                                          nothing
    free running                      nothing that anybody waits for                                everything

with intra = 2 · 2(g−1)/g S/β_nv (averaged within the node before, and told to all of it afterwards), M the number of
messages into which an all-reduce cuts the gradients, and codec = the bytes that compressing reads and writes, over the
speed of its kernel. A step that overlaps with t takes t_f + t_b + max(0, seconds − t). How much of the overlap a real
system gets is not for such a model to say, and so it draws a band: from none of it (the slower end) to all of it.

What is drawn beside it was read off the charts of others: Bagua's page of benchmarks (VGG16, 16 × 8 V100, 100 and
10 Gb/s, batch 32) and BlueFog's performance page (ResNet-50, 16 × 8 V100, 25 Gb/s, batches of 64 and 32). The inputs of
the model are theirs too where they gave them (links, the nccl-tests bandwidth of 100 Gb/s TCP, 1.75 GB/s for NCCL and
2.8 GB/s with bagua-net), and otherwise the throughput of a rank alone, and for BlueFog one number fitted to Horovod's
bars: α = 120 µs. Nothing is fitted to an algorithm of Bagua or BlueFog.

What comes out (the program prints it):

* The order is that of the charts wherever two bars differ by a fifth or more. 25 of 40 bars lie within their band, 36
  within 8 % of it.
* At 100 Gb/s DDP, all-reduce and QAdam lie at the end of no overlap, ByteGrad and decentralized between: what a system
  of 2020 hid behind its backward pass was little. Low-precision decentralized is 13 % slower than wire and kernels
  explain: Bagua's is one bucket, compressed as a whole after the step.
* At 10 Gb/s ByteGrad, QAdam and low-precision decentralized are published 1.40, 1.27 and 1.56 times *faster* than the
  band's better end. ByteGrad's 2 · 15/16 · 141 MB alone take 0.21 s at 1.25 GB/s, and its whole step is published as
  0.21 s, of which forward is 0.05 s. Its ratio to DDP is theirs 4.3, ours 2.7 to 3.2. A limit that lets bursts
  pass, or one above its name, would explain it; the page does not say how the rate was limited.
* BlueFog's one-peer bars lie within their bands and nearly flat, as the model has them; Horovod's fall with the number
  of GPUs by its latency, which is the number that was fitted.
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.network.table import RESULTS


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
class Cost:
    """What an exchange takes, and how much of it can hide, in seconds."""

    seconds: float
    hides: float


Algorithm = Callable[[Training, Cluster, int], Cost]


def intra(t: Training, c: Cluster) -> float:
    """Averaging within a node before the exchange, and telling all of it afterwards."""
    g = c.per_node
    return 2 * 2 * (g - 1) / g * t.size / c.beta_intra


def codec(t: Training, c: Cluster) -> float:
    """Compressing S, averaging the codes of shards and decompressing S: 5, 2 and 5 bytes a value."""
    return 12 * t.values / c.codec


def one_ring(t: Training, c: Cluster, m: int) -> Cost:
    """All-reduce as NCCL and Horovod do it over all ranks; a ring enters and leaves a node once."""
    n = m * c.per_node
    return Cost(t.messages * 2 * (n - 1) * c.alpha + 2 * (n - 1) / n * t.size / c.beta, t.backward)


def by_nodes(t: Training, c: Cluster, m: int) -> Cost:
    """All-reduce within nodes and between their leaders."""
    return Cost(intra(t, c) + 2 * (m - 1) * c.alpha + 2 * (m - 1) / m * t.size / c.beta, t.backward)


def compressed(t: Training, c: Cluster, m: int) -> Cost:
    """ByteGrad, QAdam: scattered and gathered in 8 bits between leaders."""
    wire = 2 * (m - 1) / m * c.packed * t.size / c.beta
    return Cost(intra(t, c) + 2 * c.alpha + wire + codec(t, c), t.backward)


def decentralized(t: Training, c: Cluster, m: int) -> Cost:
    """Bagua's: leaders average the weights while forward and backward run."""
    return Cost(by_nodes(t, c, m).seconds, t.seconds)


def low_precision(t: Training, c: Cluster, m: int) -> Cost:
    """Differences in 8 bits to two neighbours, after the step."""
    return Cost(intra(t, c) + 2 * c.alpha + 2 * c.packed * t.size / c.beta + codec(t, c), 0.0)


def one_peer(t: Training, c: Cluster, m: int) -> Cost:
    """One rank of a node sends its weights to one of another, while forward and backward run."""
    return Cost(c.alpha + t.size / c.beta, t.seconds)


def one_peer_by_nodes(t: Training, c: Cluster, m: int) -> Cost:
    """The mean of a node to one other node."""
    return Cost(intra(t, c) + c.alpha + t.size / c.beta, t.backward)


def local_steps(t: Training, c: Cluster, m: int, every: int = 8) -> Cost:
    """An all-reduce by nodes after every `every` steps."""
    return Cost(by_nodes(t, c, m).seconds / every, 0.0)


def free_running(t: Training, c: Cluster, m: int) -> Cost:
    """Nobody waits."""
    return Cost(0.0, 0.0)


def throughput(algorithm: Algorithm, t: Training, c: Cluster, m: int, overlap: float = 1.0) -> float:
    """Images a second of m nodes, with so much of the possible overlap."""
    cost = algorithm(t, c, m)
    exposed = cost.seconds - min(cost.seconds, overlap * cost.hides)
    return m * c.per_node * t.batch / (t.seconds + exposed)


# What others published: images a second.

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
_THEIRS: dict[str, Algorithm] = {"Horovod": one_ring, "H_N_AR": one_peer_by_nodes, "N_AR": one_peer}


def _bluefog(batch: int) -> list[Published]:
    linear, bars = _BLUEFOG[batch]
    training = Training(25_557_032, batch, batch / (linear / 128), messages=3)  # 102 MB in Horovod's buffers of 64
    return [
        Published(name, value, _THEIRS[name], TCP_25, training, nodes)
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


def measured(path: Path | None) -> tuple[Cluster, Training]:
    """Inputs of the outlook: fields of `Cluster` and `Training`, from a JSON object that may name any of them.

    Raises:
        ValueError: it names something else.
    """
    given = {} if path is None else json.loads(path.read_text())
    known = {kind: {f.name for f in fields(kind)} for kind in (Cluster, Training)}
    unknown = set(given) - known[Cluster] - known[Training]
    if unknown:
        raise ValueError(
            f"{path} names {', '.join(sorted(unknown))}, which the model does not have; "
            f"it has {', '.join(sorted(known[Cluster] | known[Training]))}"
        )
    start = Cluster(per_node=1, beta=1.25e9), Training(25_557_032, 64, 64 / 350)
    cluster, training = (replace(s, **{k: v for k, v in given.items() if k in known[type(s)]}) for s in start)
    assert isinstance(cluster, Cluster) and isinstance(training, Training)
    return cluster, training


# Figures

OURS: dict[str, Algorithm] = {
    "all-reduce, one ring": one_ring,
    "all-reduce, by nodes": by_nodes,
    "bytegrad, by nodes": compressed,
    "decentralized, one peer": one_peer,
    "low-precision decentralized, ring": low_precision,
    "local SGD, every 8": local_steps,
    "free running": free_running,
}
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = "osD^vPX"


def draw_bagua(figure: Figure) -> None:
    """Bands of the model and their bars' heights, a panel for each network."""
    panels = figure.subplots(1, len(BAGUA), sharey=True)
    for axes, (rate, bars) in zip(panels, BAGUA.items(), strict=True):
        _bands(axes, bars, [bar.name for bar in bars])
        axes.set(title=f"VGG16, 128 V100, {rate}", xlabel="images a second")
    figure.supxlabel(
        "◆ published: Bagua's tutorial, benchmark page, read off its chart     ▬ α–β model, from no overlap to all\n"
        "What is published of 8-bit algorithms at 10 Gb/s is faster than 1.25 GB/s allow: see bench/scaling.py",
        fontsize="small",
    )


def draw_bluefog(figure: Figure) -> None:
    """Throughput to a linear one by the number of GPUs."""
    panels = figure.subplots(1, len(BLUEFOG), sharey=True)
    for axes, (batch, bars) in zip(panels, BLUEFOG.items(), strict=True):
        for name, colour, marker, aside in zip(_THEIRS, COLOURS, MARKERS, (0.92, 1.0, 1.08), strict=False):
            mine = [bar for bar in bars if bar.name == name]
            linear = [8 * bar.nodes * bar.training.batch / bar.training.seconds for bar in mine]
            at = [8 * bar.nodes * aside for bar in mine]  # beside one another
            low, high = ([band(bar)[end] / line for bar, line in zip(mine, linear, strict=True)] for end in (0, 1))
            axes.vlines(at, low, high, color=colour, alpha=0.35, linewidth=7)
            shares = [bar.value / line for bar, line in zip(mine, linear, strict=True)]
            axes.plot(at, shares, color=colour, linestyle="", marker=marker, label=f"{name}, published")
        axes.set(
            title=f"ResNet-50, {batch} images a GPU, 25 Gb/s", xlabel="GPUs, 8 a node", xscale="log", ylim=(0, 1.05)
        )
        axes.set_xticks([16, 32, 64, 128], ["16", "32", "64", "128"])
        axes.minorticks_off()
        _tidy(axes)
    panels[0].set_ylabel("throughput, to linear")
    panels[0].legend(loc="lower left", frameon=False, fontsize="small")
    figure.supxlabel(
        "points: BlueFog's performance page, read off its charts; bars: α–β model, from no overlap to all of it",
        fontsize="small",
    )


def draw_outlook(figure: Figure, cluster: Cluster, training: Training) -> None:
    """Efficiency up to 1,024 nodes at three rates, with all possible overlap."""
    nodes = [2**i for i in range(1, 11)]
    panels = figure.subplots(1, 3, sharey=True)
    for axes, gigabits in zip(panels, (1, 10, 100), strict=True):
        there = replace(cluster, beta=gigabits / 8 * 1e9)
        for (name, algorithm), colour, marker in zip(OURS.items(), COLOURS, MARKERS, strict=True):
            alone = [m * there.per_node * training.batch / training.seconds for m in nodes]
            shares = [throughput(algorithm, training, there, m) / a for m, a in zip(nodes, alone, strict=True)]
            axes.plot(nodes, shares, color=colour, marker=marker, markersize=4, linewidth=1.2, label=name)
        axes.set(
            title=f"{gigabits} Gb/s",
            xlabel="nodes" if there.per_node == 1 else f"nodes of {there.per_node} GPUs",
            xscale="log",
            yscale="log",
        )
        _tidy(axes)
    panels[0].set_ylabel("throughput, to linear")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize="small")
    figure.supxlabel(
        f"α–β model, not measured: α = {cluster.alpha * 1e6:g} µs, {training.values / 1e6:.1f} M values, "
        f"{training.seconds * 1e3:.0f} ms of forward and backward for {training.batch} images",
        fontsize="small",
    )


def _bands(axes: Axes, bars: Sequence[Published], names: Sequence[str]) -> None:
    for y, bar in enumerate(bars):
        low, high = band(bar)
        axes.barh(y, max(high - low, 100), left=low, height=0.5, color=COLOURS[1], alpha=0.5)
        axes.plot(bar.value, y, marker="D", color=COLOURS[2], linestyle="")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(left=0)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.title.set_fontsize("small")


def report() -> str:
    """Published and model side by side."""
    lines = [f"{'':<16}{'':<32}{'published':>10}{'no overlap':>12}{'overlap':>10}"]
    for where, bars in [*BAGUA.items(), *((f"batch {batch}", bars) for batch, bars in BLUEFOG.items())]:
        for bar in bars:
            low, high = band(bar)
            name = bar.name if bar.nodes == 16 else f"{bar.name}, {8 * bar.nodes} GPUs"
            lines.append(f"{where:<16}{name:<32}{bar.value:>10,.0f}{low:>12,.0f}{high:>10,.0f}")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Print the comparison and draw three figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description="An α–β model of training.")
    parser.add_argument("--measured", type=Path, metavar="JSON", help="fields of Cluster and Training, for the outlook")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="(%(default)s)")
    options = parser.parse_args(words)
    try:
        cluster, training = measured(options.measured)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(report())
    options.out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Callable[[Figure], None]] = {
        "scaling-vgg16": draw_bagua,
        "scaling-resnet50": draw_bluefog,
        "scaling-outlook": lambda figure: draw_outlook(figure, cluster, training),
    }
    for name, paint in figures.items():
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        paint(figure)
        figure.savefig(options.out / f"{name}.png", dpi=150)
        print(f"The picture is {options.out / name}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
