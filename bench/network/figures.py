"""What has been measured, drawn: throughput by bandwidth, scaling by hosts, loss against time, stragglers, exchanges.

A line of a figure is told by its colour (of Okabe and Ito, apart for colour-blind eyes), its dashes and its marker.
"""

import itertools
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .contenders import ALONE, LOCAL
from .exchanges import EXCHANGES
from .reports import line_of, names_with, throughput
from .steps import HOSTS, RATES, SCALED_RATE, SLOWNESS
from .table import Table
from .tasks import TASKS, task

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
STYLES = list(
    itertools.islice(zip(*map(itertools.cycle, (COLOURS, ["-", "--", "-.", ":"], "osD^vPX*")), strict=False), 40)
)
SHORT = (  # those of the figure that README.md shows, the first being what the others are compared to
    "DDP",
    "DDP, bf16 hook",
    "DDP, PowerSGD hook",
    "hivemind",
    "bytegrad",
    "power_sgd",
    "top_k",
    "decentralized, AWC",
    "choco, one peer",
    "local_sgd",
    "diloco",
)
NICE = {"100mbit": "100 Mb/s", "500mbit": "500 Mb/s", "1gbit": "1 Gb/s", "unshaped": "unshaped"}


def draw(trained: Table, exchanged: Table, folder: Path) -> list[Path]:
    """Draw what there is to draw; return the pictures."""
    cells = longest(trained)
    made: list[tuple[str, Callable[[Figure], bool]]] = [
        ("network-front", lambda figure: in_short(figure, cells)),
        ("network-throughput", lambda figure: by_bandwidth(figure, cells)),
        ("network-scaling", lambda figure: by_hosts(figure, cells)),
        ("network-loss", lambda figure: by_time(figure, cells)),
        ("network-straggler", lambda figure: with_straggler(figure, cells)),
        ("network-exchanges", lambda figure: of_exchanges(figure, exchanged)),
    ]
    paths = []
    for name, paint in made:
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        if paint(figure):
            path = folder / f"{name}.png"
            figure.savefig(path, dpi=150)
            paths.append(path)
    return paths


Cells = list[tuple[dict[str, Any], Any]]


def longest(table: Table) -> Cells:
    """Of cells that differ in the number of steps alone, such as those of `--quick`, the one with the most."""
    found: dict[tuple[Any, ...], tuple[dict[str, Any], Any]] = {}
    for cell, result in sorted(table, key=lambda row: row[0]["steps"]):
        found[tuple(cell[key] for key in ("task", "rate", "hosts", "straggler", "algorithm"))] = (cell, result)
    return list(found.values())


def styles(cells: Cells, without: str | None = None) -> dict[str, dict[str, Any]]:
    """How the line of each contender, but one perhaps, is drawn: the same in all figures of these cells."""
    return {
        name: {"color": colour, "linestyle": dashes, "marker": marker, "markersize": 4, "linewidth": 1.3}
        for name, (colour, dashes, marker) in zip(names_with(cells), STYLES, strict=False)
        if name != without
    }


def chosen(cells: Cells, **asked: Any) -> Iterator[tuple[dict[str, Any], Any]]:
    """The cells that are as asked."""
    return ((cell, r) for cell, r in cells if all(cell[key] == value for key, value in asked.items()))


def in_short(figure: Figure, cells: Cells) -> bool:
    """How many times as fast as DDP, at the two slower rates: a bar for each of some contenders."""
    figure.set_size_inches(8, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    drawn = False
    for axes, rate in zip(panels, RATES[:2], strict=True):
        asked = {"task": "wide", "rate": rate, "straggler": False, "hosts": HOSTS}
        steps = {cell["algorithm"]: r["step"] for cell, r in chosen(cells, **asked)}
        names = [name for name in SHORT if name in steps and SHORT[0] in steps]
        speeds = [steps[SHORT[0]] / steps[name] for name in names]
        theirs = [name.startswith(("DDP", "hivemind")) for name in names]
        bars = axes.barh(names, speeds, color=[COLOURS[0] if other else COLOURS[1] for other in theirs])
        axes.bar_label(bars, [f"{speed:.1f} ×" for speed in speeds], padding=3, fontsize="small")
        axes.set(title=f"{HOSTS} hosts, links of {NICE[rate]}", xlabel="steps in the time of one of DDP")
        axes.margins(x=0.15)
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        drawn = drawn or bool(names)
    panels[0].invert_yaxis()
    about = f"{task('wide').about}; hivemind, local_sgd and diloco average every {LOCAL} steps"
    figure.suptitle(about, fontsize="small")
    return drawn


def by_bandwidth(figure: Figure, cells: Cells) -> bool:
    """Images a second at each rate, a line for each algorithm and a panel for each task."""
    tasks = [each for each in TASKS if any(chosen(cells, task=each.name, straggler=False, hosts=HOSTS))]
    panels = figure.subplots(1, max(1, len(tasks)), squeeze=False)[0]
    for axes, each in zip(panels, tasks, strict=False):
        for name, style in styles(cells).items():
            found = {
                cell["rate"]: throughput(r)
                for cell, r in chosen(cells, task=each.name, algorithm=name, straggler=False, hosts=HOSTS)
            }
            at = [i for i, rate in enumerate(RATES) if rate in found]
            if at:
                axes.plot(at, [found[RATES[i]] for i in at], label=name, **style)
        axes.set_xticks(range(len(RATES)), [NICE[rate] for rate in RATES], rotation=35, ha="right")
        axes.set(title=textwrap.fill(each.about, 40), xlabel="each host's link", yscale="log")
        tidy(axes)
    panels[0].set_ylabel(f"images a second, {HOSTS} hosts")
    return named(figure, panels[0])


def by_hosts(figure: Figure, cells: Cells) -> bool:
    """Throughput by the number of hosts, as a share of that of as many hosts with nothing to exchange."""
    axes, times = figure.subplots(1, 2)
    asked = {"task": "wide", "rate": SCALED_RATE, "straggler": False}
    alone = {cell["hosts"]: throughput(r) for cell, r in chosen(cells, algorithm=ALONE, **asked)}
    for name, style in styles(cells, without=ALONE).items():
        found = sorted((cell["hosts"], r) for cell, r in chosen(cells, algorithm=name, **asked))
        found = [(n, r) for n, r in found if n in alone]
        if len(found) > 1:
            hosts = [n for n, _ in found]
            efficiency = [throughput(r) / alone[n] for n, r in found]
            axes.plot(hosts, efficiency, label=name, **style)
            exposed = [1e3 * (r["step"] - r["compute"]) for _, r in found]
            times.plot(hosts, exposed, label=name, **style)
    for each, words in ((axes, "throughput to that of as many hosts alone"), (times, "ms a step beyond computing")):
        each.set(xlabel=f"hosts, each on {NICE[SCALED_RATE]}", ylabel=words, yscale="log", title=task("wide").about)
        each.set_xticks([2, 4, 8], ["2", "4", "8"])
        tidy(each)
    return named(figure, axes)


def by_time(figure: Figure, cells: Cells) -> bool:
    """How the training loss falls, smoothed over eight steps, at the two slower rates."""
    rates = [rate for rate in RATES[:2] if any(chosen(cells, task="wide", rate=rate, straggler=False, hosts=HOSTS))]
    panels = figure.subplots(1, max(1, len(rates)), sharey=True, squeeze=False)[0]
    for axes, rate in zip(panels, rates, strict=False):
        asked = {"task": "wide", "rate": rate, "straggler": False, "hosts": HOSTS}
        for name, style in styles(cells, without=ALONE).items():
            for _, r in chosen(cells, algorithm=name, **asked):
                bare = style | {"marker": "", "linewidth": 1.5}
                axes.plot(r["seconds"], smooth(r["losses"]), label=name, **bare)
        axes.set(xlabel="seconds", title=NICE[rate], xscale="log", yscale="log")
        tidy(axes)
    figure.suptitle(task("wide").about, fontsize="small")
    panels[0].set_ylabel("training loss, the mean over hosts")
    return named(figure, panels[0])


def smooth(values: list[float], width: int = 8) -> list[float]:
    """The mean of the latest `width`."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(width, i + 1) for i in range(len(values))]


def with_straggler(figure: Figure, cells: Cells) -> bool:
    """Speed that the other hosts keep when the last one is slow: a panel for each rate, a mark for each task."""
    slowed = list(chosen(cells, straggler=True, hosts=HOSTS))
    rates = [rate for rate in RATES if any(chosen(slowed, rate=rate, algorithm=ALONE))]
    names = [name for name in styles(slowed, without=ALONE) if any(chosen(slowed, algorithm=name))]
    panels = figure.subplots(1, max(1, len(rates)), sharex=True, sharey=True, squeeze=False)[0]
    for axes, rate in zip(panels, rates, strict=False):
        for each, (colour, _, marker) in zip(TASKS, STYLES[1:], strict=False):
            kept = speeds_kept({cell["algorithm"]: r for cell, r in chosen(slowed, rate=rate, task=each.name)})
            at = [y for y, name in enumerate(names) if name in kept]
            if at:
                axes.plot([kept[names[y]] for y in at], at, marker, color=colour, label=each.about)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set(xlabel="speed kept by the others", title=NICE[rate])
        tidy(axes)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    figure.suptitle(f"One of {HOSTS} hosts computes {SLOWNESS} times slower", fontsize="small")
    return named(figure, panels[0], "outside lower center")


def speeds_kept(results: dict[str, Any]) -> dict[str, float]:
    """Of each algorithm, the speed of the hosts that are not slow, of theirs when nothing is exchanged."""
    if ALONE not in results:
        return {}
    return {name: others(results[ALONE]) / others(result) for name, result in results.items() if name != ALONE}


def others(result: Any) -> float:
    """Seconds a step on the hosts that are not slow, the mean."""
    quick = result["step_by_rank"][:-1]
    return float(sum(quick) / len(quick))


def of_exchanges(figure: Figure, exchanged: Table) -> bool:
    """Times to their ideal lines, a panel for each size."""
    sizes = sorted({cell["mib"] for cell, _ in exchanged})
    panels = figure.subplots(1, max(1, len(sizes)), sharey=True, squeeze=False)[0]
    hosts = sorted({cell["hosts"] for cell, _ in exchanged})
    places = list(itertools.product(RATES[:-1], hosts))
    for axes, mib in zip(panels, sizes, strict=False):
        for name, (colour, dashes, marker) in zip(EXCHANGES, STYLES, strict=False):
            at, ratios = [], []
            for cell, result in exchanged:
                line = line_of(result[name]["formula"], cell["rate"]) if name in result else None
                if cell["mib"] == mib and line:
                    at.append(places.index((cell["rate"], cell["hosts"])))
                    ratios.append(result[name]["seconds"] / line)
            order = sorted(zip(at, ratios, strict=True))
            xs, ys = [x for x, _ in order], [y for _, y in order]
            axes.plot(xs, ys, color=colour, linestyle=dashes, marker=marker, linewidth=1, label=name)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.axhline(1514 / 1448, color="grey", linewidth=0.8, linestyle=":")
        axes.set_xticks(range(len(places)), [f"{n} × {NICE[rate]}" for rate, n in places], rotation=35, ha="right")
        axes.set(title=f"{mib} MiB; the dotted line is what frames' headers cost", ylabel="time to the ideal line")
        tidy(axes)
    return named(figure, panels[0])


def tidy(axes: Axes) -> None:
    """Fewer strokes."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.title.set_fontsize("small")


def named(figure: Figure, axes: Axes, where: str = "outside right center") -> bool:
    """Put one legend beside all panels; False if nothing has been drawn."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc=where, frameon=False, fontsize="small")
    return bool(handles)
