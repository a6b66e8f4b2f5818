"""Drawings of a topology: its graph and its mixing matrix, round by round."""

from fractions import Fraction
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A single hue from white to dark is readable with every kind of colour vision, and in grey print.
SHADES, INK = "Blues", "#0b3c6f"
MOST_ACROSS = 5
SMALL = 8  # up to this number of ranks weights are printed as fractions; above it a colour bar shows them


def draw(name: str, matrices: list[NDArray[np.float64]], period: int, exact: int | None) -> "Figure":
    """Draw the graph of each round, and its mixing matrix below.

    `name` builds the topology; `exact` is the number of rounds that give the exact mean, or None.
    """
    try:
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("drawing a topology needs matplotlib: pip install matplotlib") from missing

    count, size = len(matrices), len(matrices[0])
    panel = 2.6 if size <= 16 else 3.4  # inches
    down = ceil(count / MOST_ACROSS)
    rows, columns = (1, 2) if count == 1 else (2 * down, ceil(count / down))
    figure = Figure(figsize=(1.1 * columns * panel, rows * panel + 0.8), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    graphs, tables = ([*axes[first::2].flat] if count > 1 else [axes[0, first]] for first in (0, 1))

    # The square root keeps 1/n distinguishable from 0.
    shades = PowerNorm(0.5, vmin=0, vmax=1 if size <= SMALL else 1.2 * max(float(w.max()) for w in matrices))
    for axis in axes.flat:
        axis.set_axis_off()
    for round, (mixing, graph, table) in enumerate(zip(matrices, graphs, tables, strict=False)):
        graph.set_title(f"round {round}" if count > 1 else "", fontsize=10)
        _draw_graph(graph, mixing)
        image = _draw_matrix(table, mixing, shades)
    if size > SMALL:
        figure.colorbar(image, ax=tables[:count], shrink=0.75, label="weight", pad=0.02, format="%.2g")

    facts = f"first {count} rounds" + (f" of {period}" if period < 1 << 32 else "")
    if count >= period:
        facts = f"repeats after {period} rounds" if period > 1 else "the same in every round"
    if exact:
        facts += f" · exact after {exact}" if period > 1 else " · exact after one"
    short = name if len(name) <= 40 else f"{name.partition('(')[0]}(…)"
    figure.suptitle(f"{short} on {size} rank{'s' * (size > 1)}\n{facts}", fontsize=11)
    return figure


def _draw_graph(axes: "Axes", mixing: NDArray[np.float64]) -> None:
    """Draw ranks on a circle, and a line between two that hear each other alike, else an arrow to the receiver."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle, FancyArrowPatch

    size = len(mixing)
    angles = 2 * np.pi * np.arange(size) / size
    places = np.stack([np.sin(angles), np.cos(angles)], axis=1)  # clockwise, rank 0 at the top
    radius = min(0.2, 0.56 * float(np.sin(np.pi / size))) if size > 1 else 0.2
    circles = [axes.add_patch(Circle(place, radius, facecolor="white", edgecolor=INK, zorder=2)) for place in places]
    for rank, (x, y) in enumerate(places if radius > 0.06 else []):
        axes.text(x, y, str(rank), fontsize=50 * radius, ha="center", va="center", color=INK)

    others = mixing - np.diag(np.diag(mixing))
    crowd = min(1.0, 50 / max(1, int(np.count_nonzero(others))))  # many edges are drawn thin and pale
    widths, alpha = (0.3 + 2.2 * others**0.5) * max(0.3, crowd), 0.35 + 0.65 * crowd
    mutual = (others != 0) & (others == others.T)
    i, j = np.nonzero(np.tril(mutual))
    lines = list(np.stack([places[i], places[j]], axis=1))
    axes.add_collection(LineCollection(lines, linewidths=widths[i, j], colors=INK, alpha=alpha, zorder=1))
    for hearer, heard in np.argwhere((others != 0) & ~mutual):
        ends: dict[str, Any] = {"patchA": circles[heard], "patchB": circles[hearer], "shrinkA": 0, "shrinkB": 0}
        look = {"arrowstyle": "-|>", "mutation_scale": 9 if size <= 16 else 6, "linewidth": widths[hearer, heard]}
        axes.add_patch(FancyArrowPatch(places[heard], places[hearer], color=INK, alpha=alpha, zorder=1, **ends, **look))
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")


def _draw_matrix(axes: "Axes", mixing: NDArray[np.float64], shades: Any) -> Any:
    """Draw a matrix, whose rows hear its columns: weights as shades, and as fractions if it is small."""
    size = len(mixing)
    axes.set_axis_on()
    ticks = range(0, size, ceil(size / 8))
    axes.set(xticks=ticks, yticks=ticks, xlabel="hears rank", ylabel="rank")
    axes.tick_params(length=0, labelsize=8)
    for i, j in np.argwhere(mixing).tolist() if size <= SMALL else ():
        near = Fraction(mixing[i, j]).limit_denominator(64)
        weight = str(near) if abs(near - Fraction(mixing[i, j])) < 1e-12 else f"{mixing[i, j]:.2f}"
        color = "white" if mixing[i, j] > 0.4 else "black"
        axes.text(j, i, weight, ha="center", va="center", color=color, fontsize=11 - 0.5 * size)
    return axes.imshow(mixing, cmap=SHADES, norm=shades)
