"""The pictures of the front door: loss against seconds, and against bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from baguakit.compare.compose import Row
from baguakit.compare.contenders import DDP
from bench.network.panels import COLOURS, GREY, plain, tidy
from bench.network.table import RESULTS, Table

from . import compose

NETWORK = "100 Mb/s"
PICTURES = {
    "frontier-seconds": f"Validation loss against seconds at {NETWORK}, four hosts",
    "frontier-bytes": "Validation loss against bytes that a rank has sent",
}
MOST, LINE = 5, 0.055  # named curves of ours, beside DDP's; the height of a name, to that of the picture


def draw(losses: Table, timings: Table, folder: Path = RESULTS) -> list[Path]:
    """Draw what there is to draw; return the pictures."""
    found, goals = compose.rows(losses, timings, NETWORK), compose.targets(losses)
    if not found or not goals:
        return []
    goal, paths = goals[-1], []
    costs = {"seconds": lambda row: row.seconds(goal), "gigabytes": lambda row: row.bytes(goal)}
    for (name, title), (of, cost) in zip(PICTURES.items(), costs.items(), strict=True):
        names = [row.contender.name for row in compose.best(found, cost)[:MOST]]
        figure = Figure(figsize=(8, 4), layout="constrained")
        panel(figure.add_subplot(), found, names, of, goal)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


def panel(axes: Axes, found: Sequence[Row], names: Sequence[str], of: str, goal: float) -> None:
    """Draw the curves of the named rows in colours, and those of peers in grey."""
    colours = dict(zip(names, COLOURS, strict=False))
    ends = []
    for row in found:
        name = row.contender.name
        if name not in colours and not row.contender.peer:
            continue
        x, y = course(row, row.step if of == "seconds" else row.sent / 1e9)
        named = name in colours or row.contender == DDP
        colour = colours.get(name, "black" if named else GREY)
        axes.plot(x, y, color=colour, linewidth=1.6 if named else 0.9, alpha=1.0 if named else 0.7)
        ends.append((x[-1], y[-1], name, colour, named))
    axes.axhline(goal, color=GREY, linewidth=0.7, linestyle=":")
    axes.set(xscale="log", xlabel=of, ylabel="bits per byte, held out")
    plain(axes.xaxis)
    tidy(axes)
    label(axes, ends)


def course(row: Row, scale: float) -> tuple[list[float], list[float]]:
    """Return steps, times a scale, and the mean loss over seeds."""
    return [x * scale for x, _ in row.curve()], [loss for _, loss in row.curve()]


def label(axes: Axes, ends: Sequence[tuple[float, float, str, Any, bool]]) -> None:
    """Write names at the right: the further right a curve ends the lower, so that few of the lines to them cross."""
    lowest = min(axes.transAxes.inverted().transform(axes.transData.transform(end[:2]))[1] for end in ends)
    for place, (x, y, name, colour, named) in enumerate(sorted(ends, key=lambda end: -end[0])):
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "relpos": (0, 0.5)}
        style = {"fontsize": 8 if named else 7, "va": "center", "color": colour}
        at = (1.02, lowest + LINE * place)
        axes.annotate(name, (x, y), at, textcoords="axes fraction", arrowprops=arrow, **style)
