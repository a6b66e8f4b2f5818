"""Three figures: Bagua's, BlueFog's, and an outlook to 1,024 nodes."""

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .model import (
    Algorithm,
    Cluster,
    Training,
    by_nodes,
    compressed,
    free_running,
    local_steps,
    low_precision,
    low_precision_one_peer,
    one_peer,
    one_ring,
    throughput,
)
from .published import BAGUA, BLUEFOG, THEIRS, Published, band

OURS: dict[str, Algorithm] = {
    "all-reduce, one ring": one_ring,
    "all-reduce, by nodes": by_nodes,
    "bytegrad, by nodes": compressed,
    "decentralized, one peer": one_peer,
    "low-precision decentralized, ring": low_precision,
    "low-precision, one peer (choco)": low_precision_one_peer,
    "local SGD, every 8": local_steps,
    "free running": free_running,
}
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999", "#56B4E9", "#E69F00")
MARKERS = "osD^v*PX"


def draw_bagua(figure: Figure) -> None:
    """Bands of the model and their bars' heights, a panel for each network."""
    panels = figure.subplots(1, len(BAGUA), sharey=True)
    for axes, (rate, bars) in zip(panels, BAGUA.items(), strict=True):
        _bands(axes, bars, [bar.name for bar in bars])
        axes.set(title=f"VGG16, 128 V100, {rate}", xlabel="images a second")
    figure.supxlabel(
        "◆ published: Bagua's tutorial, benchmark page, read off its chart     ▬ α–β model, from no overlap to all\n"
        "What is published of 8-bit algorithms at 10 Gb/s is faster than 1.25 GB/s allow: see bench.scaling",
        fontsize="small",
    )


def draw_bluefog(figure: Figure) -> None:
    """Throughput to a linear one by the number of GPUs."""
    panels = figure.subplots(1, len(BLUEFOG), sharey=True)
    for axes, (batch, bars) in zip(panels, BLUEFOG.items(), strict=True):
        for name, colour, marker, aside in zip(THEIRS, COLOURS, MARKERS, (0.92, 1.0, 1.08), strict=False):
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


def draw_outlook(figure: Figure, cluster: Cluster, training: Training, measured: bool = False) -> None:
    """Efficiency up to 1,024 nodes at three rates, with all possible overlap; the last is that of the cluster,
    if it was measured."""
    nodes, rates = [2**i for i in range(1, 11)], [1.0, 10.0, cluster.beta * 8e-9 if measured else 100.0]
    panels = figure.subplots(1, 3, sharey=True)
    for axes, gigabits in zip(panels, rates, strict=True):
        there = replace(cluster, beta=gigabits / 8 * 1e9)
        for (name, algorithm), colour, marker in zip(OURS.items(), COLOURS, MARKERS, strict=True):
            alone = [m * there.per_node * training.batch / training.seconds for m in nodes]
            shares = [throughput(algorithm, training, there, m) / a for m, a in zip(nodes, alone, strict=True)]
            axes.plot(nodes, shares, color=colour, marker=marker, markersize=4, linewidth=1.2, label=name)
        axes.set(
            title=f"{gigabits:.3g} Gb/s" + " (measured)" * (measured and axes is panels[-1]),
            xlabel="nodes" if there.per_node == 1 else f"nodes of {there.per_node} GPUs",
            xscale="log",
            yscale="log",
        )
        _tidy(axes)
    panels[0].set_ylabel("throughput, to linear")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize="small")
    figure.supxlabel(
        f"α–β model: α = {cluster.alpha * 1e6:g} µs, {training.values / 1e6:.1f} M values, "
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
