"""Panels of a few curves each, whose names stand beside their ends."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from baguakit.pictures import OTHERS, style_of

DDP = "DDP"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
GREY = "#777777"
MOST = len(COLOURS)  # curves in a panel
WIDTH = 8  # inches: its letters can be read where a page shows a picture 700 pixels wide
NAME, LINE = 7.5, 0.085  # points of a name beside a curve; the height of its line, to that of a panel
SHORTER = {  # in two lines
    "low_precision_decentralized": "low_precision_\ndecentralized",
    "async_model_average": "async_model_\naverage",
    "async_model_average, 0.5 s": "async_model_\naverage, 0.5 s",
    "its messages alone": "messages of\ncompressed_mean_",
}

Curves = dict[str, dict[float, float]]


@dataclass(frozen=True)
class Panel:
    """Some curves by their names.

    Attributes:
        title, xlabel, ylabel: texts around it.
        curves: y by x.
        like: panels of one word have the same axes.
        ticks: names of places on the x axis; without them it is logarithmic, and curves have no markers.
        yscale: "log" or "linear".
    """

    title: str
    xlabel: str
    ylabel: str
    curves: Curves
    like: str
    ticks: dict[float, str] | None = None
    yscale: str = "log"


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the line style of each curve: algorithms have their colours, and other names those that are free."""
    free, markers = iter(COLOURS), itertools.cycle("soD^vP*")
    shown = {"markersize": 3.5, "linewidth": 1.4}
    found = {}
    for name in names:
        own = style_of(name)
        own = {"color": next(free)} if own["color"] in OTHERS else own
        found[name] = own | {"marker": next(markers)} | shown
    return found


def multiples(figure: Figure, panels: Sequence[Panel]) -> list[Axes]:
    """Draw panels in two columns; return their axes."""
    high = (len(panels) + 1) // 2
    figure.set_size_inches(WIDTH, 0.4 + 2.2 * max(1, high))
    drawn: list[Axes] = []
    first: dict[str, Axes] = {}
    for place, panel in enumerate(panels, start=1):
        same = first.get(panel.like)
        axes = figure.add_subplot(high, 2, place, sharex=same, sharey=same)
        first.setdefault(panel.like, axes)
        for name, style in styles(panel.curves).items():
            bare = {} if panel.ticks else {"marker": ""}
            axes.plot(*zip(*sorted(panel.curves[name].items()), strict=True), label=name, **style | bare)
        axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel, yscale=panel.yscale)
        if panel.ticks:
            axes.set_xticks(list(panel.ticks), list(panel.ticks.values()))
        else:
            axes.set_xscale("log")
            plain(axes.xaxis)
        if panel.yscale == "log":
            plain(axes.yaxis)
        axes.set_title(panel.title, loc="left")
        tidy(axes)
        drawn.append(axes)
    for axes in drawn:  # after all: panels that are alike have found their limits now
        name_ends(axes)
    return drawn


def plain(axis: Any) -> None:
    """Write 0.1 and 100 rather than powers of ten."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    low, high = axis.get_view_interval()
    if high / low > 10:
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if f"{value:e}"[0] in "125" else ""))


def name_ends(axes: Axes) -> None:
    """Write the name of each curve on the right, at the height of its end or as near as the others leave room."""
    lines = list(axes.lines)
    texts = [SHORTER.get(str(line.get_label()), str(line.get_label())) for line in lines]
    ends = [(line.get_xdata()[-1], line.get_ydata()[-1]) for line in lines]
    places = [axes.transAxes.inverted().transform(axes.transData.transform(end)) for end in ends]
    wanted = [y + 0.01 * x for x, y in places]  # of ends as high as each other, that on the left has the lower name
    heights = [LINE * (1 + text.count("\n")) for text in texts]
    for line, text, end, y in zip(lines, texts, ends, spread(wanted, heights), strict=True):
        colour = line.get_color()
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "relpos": (0, 0.5)}
        axes.annotate(
            text,
            xy=end,
            xytext=(1.06, y),
            textcoords="axes fraction",
            color=colour,
            fontsize=NAME,
            linespacing=0.95,
            va="center",
            arrowprops=leader | {"shrinkA": 1, "shrinkB": 2},
        )


def spread(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Return places in the order of those wanted, and near them, where texts of these heights do not overlap."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    places = list(wanted)
    for lower, upper in pairwise(order):
        places[upper] = max(places[upper], places[lower] + (heights[lower] + heights[upper]) / 2)
    if order:
        places[order[-1]] = min(places[order[-1]], 1.0)
    for upper, lower in pairwise(order[::-1]):
        places[lower] = min(places[lower], places[upper] - (heights[lower] + heights[upper]) / 2)
    return places


def tidy(axes: Axes) -> None:
    """Fewer strokes."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
