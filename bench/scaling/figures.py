"""Three figures: Bagua's, BlueFog's, and an outlook to 1,024 nodes."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import baguakit as bk
from baguakit.pictures import COLOURS, style_of
from baguakit.topology import OnePeerExact, OnePeerExponential
from baguakit.tune import Line, Network

from .model import Algorithm, Training, cluster, codec, throughput
from .published import BAGUA, BLUEFOG, KERNELS, THEIRS, Published

a = bk.algorithms
OURS: dict[str, Algorithm] = {
    "gradient_allreduce": a.gradient_allreduce(),
    "bytegrad": a.bytegrad(),
    "decentralized, one peer": a.decentralized(OnePeerExponential()),
    "low_precision_decentralized, ring": a.low_precision_decentralized(),
    "choco, one peer": a.choco(OnePeerExact(), gamma=1.0),
    "local_sgd, every 8": a.local_sgd(8),
    "async_model_average": a.async_model_average(),
}
ALPHA = 50e-6
RESNET50 = Training(25_557_032, 64, 64 / 350)
NODES = tuple(2**i for i in range(1, 11))
MARKERS = "osD^v*PX"
COLOUR_OF = {"Horovod": "DDP", "H_N_AR": "push_sum", "N_AR": "decentralized"}  # BlueFog's names


def draw_bagua(figure: Figure) -> None:
    """Bands of the planner and their bars' heights, a panel for each network."""
    panels = figure.subplots(1, len(BAGUA), sharey=True)
    for axes, (rate, bars) in zip(panels, BAGUA.items(), strict=True):
        _bands(axes, bars, [bar.name for bar in bars])
        axes.set(title=f"VGG16, 128 V100, {rate}", xlabel="images a second")
    figure.supxlabel(
        "◆ published: Bagua's tutorial, benchmark page, read off its chart     ▬ bk.tune.predict, no overlap to all\n"
        "What is published of 8-bit algorithms at 10 Gb/s is faster than 1.25 GB/s allow: see bench.scaling",
        fontsize="small",
    )


def draw_bluefog(figure: Figure) -> None:
    """Throughput to a linear one by the number of GPUs."""
    panels = figure.subplots(1, len(BLUEFOG), sharey=True)
    for axes, (batch, bars) in zip(panels, BLUEFOG.items(), strict=True):
        for name, marker, aside in zip(THEIRS, MARKERS, (0.92, 1.0, 1.08), strict=False):
            colour = style_of(COLOUR_OF[name])["color"]
            mine = [bar for bar in bars if bar.name == name]
            linear = [bar.network.ranks * bar.training.batch / bar.training.seconds for bar in mine]
            at = [bar.network.ranks * aside for bar in mine]  # beside one another
            low, high = ([bar.band()[end] / line for bar, line in zip(mine, linear, strict=True)] for end in (0, 1))
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
        "points: BlueFog's performance page, read off its charts; bars: bk.tune.predict, from no overlap to all of it",
        fontsize="small",
    )


def draw_outlook(figure: Figure, measured: Network | None = None) -> None:
    """Efficiency up to 1,024 nodes at three rates, with all possible overlap; the last is measured, if it was."""
    networks = [cluster(2, 1, Line(ALPHA, 8e-9 / gigabits), Line(0.0, 0.0), [codec(KERNELS)]) for gigabits in (1, 10)]
    networks.append(measured or cluster(2, 1, Line(ALPHA, 8e-11), Line(0.0, 0.0), [codec(KERNELS)]))
    panels = figure.subplots(1, 3, sharey=True)
    for axes, network in zip(panels, networks, strict=True):
        for (name, algorithm), marker in zip(OURS.items(), MARKERS, strict=False):
            over = bk.hierarchical(algorithm) if network.per_node > 1 and name != "async_model_average" else algorithm
            shares = [share(over, network.of(m * network.per_node)) for m in NODES]
            axes.plot(NODES, shares, marker=marker, markersize=4, linewidth=1.2, label=name, **style_of(name))
        rate = network.links[0].all_reduce.rate * 8e-9
        axes.set(
            title=f"{rate:.3g} Gb/s" + " (measured)" * (network is measured),
            xlabel="nodes" if network.per_node == 1 else f"nodes of {network.per_node} GPUs",
            xscale="log",
            yscale="log",
        )
        _tidy(axes)
    panels[0].set_ylabel("throughput, to linear")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize="small")
    figure.supxlabel(
        f"bk.tune.predict: α = {ALPHA * 1e6:g} µs, {RESNET50.values / 1e6:.1f} M values, "
        f"{RESNET50.seconds * 1e3:.0f} ms of forward and backward for {RESNET50.batch} images",
        fontsize="small",
    )


def share(algorithm: Algorithm, network: Network) -> float:
    """Return the throughput to a linear one."""
    return throughput(algorithm, RESNET50, network) * RESNET50.seconds / network.ranks / RESNET50.batch


def _bands(axes: Axes, bars: Sequence[Published], names: Sequence[str]) -> None:
    for y, bar in enumerate(bars):
        low, high = bar.band()
        axes.barh(y, max(high - low, 100), left=low, height=0.5, color=COLOURS[0], alpha=0.5)
        axes.plot(bar.value, y, marker="D", color=COLOURS[1], linestyle="")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(left=0)
    _tidy(axes)


def _tidy(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.title.set_fontsize("small")
