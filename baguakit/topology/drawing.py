"""Drawings of a topology: its graph and its mixing matrix, round by round."""

from fractions import Fraction
from math import ceil, dist, hypot
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Place = tuple[float, float]

# A single hue from white to dark is readable with every kind of colour vision, and in grey print.
SHADES, INK, IDLE, GRID = "Blues", "#0b3c6f", "#8a8a8a", "#c8c8c8"
MOST_ACROSS = 5
SMALL = 8  # up to this number of ranks weights are printed as fractions; above it a colour bar shows them


def draw(
    name: str, matrices: list[NDArray[np.float64]], places: list[Place], period: int, exact: int | None
) -> "Figure":
    """Draw the graph and the mixing matrix of each round: below each other, or side by side for one round.

    Args:
        name: the expression that builds the topology.
        matrices: the mixing matrices of the rounds 0, 1, 2, … to draw.
        places: where to draw each rank.
        period: the period of the matrices.
        exact: the number of rounds that give the exact mean; None for none.
    """
    try:
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("drawing a topology needs matplotlib: pip install matplotlib") from missing

    count, size = len(matrices), len(places)
    panel = 2.6 if size <= 16 else 3.4  # inches
    down = ceil(count / MOST_ACROSS)
    across = ceil(count / down)
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    if count == 1:
        figure = Figure(figsize=(2.2 * panel, panel + 0.5), layout=layout)
        pairs = [tuple(figure.subplots(1, 2))]
    else:
        figure = Figure(figsize=(across * panel, 2 * down * panel + 0.5), layout=layout)
        axes = figure.subplots(2 * down, across, squeeze=False)
        pairs = [(axes[2 * row, column], axes[2 * row + 1, column]) for row in range(down) for column in range(across)]
        for left_over in (axis for pair in pairs[count:] for axis in pair):
            left_over.set_axis_off()
        pairs = pairs[:count]

    # The square root keeps 1/n distinguishable from 0.
    shades = PowerNorm(0.5, vmin=0, vmax=1 if size <= SMALL else 1.2 * max(float(w.max()) for w in matrices))
    for round, (mixing, (graph, table)) in enumerate(zip(matrices, pairs, strict=True)):
        if count > 1:
            graph.set_title(f"round {round}", fontsize=10)
        _draw_graph(graph, places, mixing)
        image = _draw_matrix(table, mixing, shades)
    if size > SMALL:
        figure.colorbar(image, ax=[table for _, table in pairs], shrink=0.75, label="weight", pad=0.02, format="%.2g")
    short = name if len(name) <= 40 else f"{name.partition('(')[0]}(…)"
    ranks = f"{size} rank{'s' * (size > 1)}"
    figure.suptitle(f"{short} on {ranks}\n{_facts(count, period, exact)}", fontsize=11)
    return figure


def _facts(count: int, period: int, exact: int | None) -> str:
    if period == 1:
        facts = "the same in every round"
    elif count >= period:
        facts = f"repeats after {period} rounds"
    else:
        facts = f"first {count} rounds" + (f" of {period}" if period < 1 << 32 else "")
    if exact:
        facts += f" · exact after {exact}" if period > 1 else " · exact after one"
    return facts


def _draw_graph(axes: "Axes", places: list[Place], mixing: NDArray[np.float64]) -> None:
    """Draw a line between ranks that hear each other with equal weights, else an arrow to the receiver."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle, FancyArrowPatch
    from matplotlib.path import Path

    size = len(places)
    radius = min(0.2, 0.38 * min((dist(a, b) for i, a in enumerate(places) for b in places[:i]), default=1.0))
    others = mixing - np.diag(np.diag(mixing))
    crowd = min(1.0, 50 / max(1, int(np.count_nonzero(others))))  # many edges are drawn thin and pale
    width = {weight: (0.3 + 2.2 * weight**0.5) * max(0.3, crowd) for weight in np.unique(others).tolist()}
    mutual = (others != 0) & (others == others.T)
    alpha = 0.35 + 0.65 * crowd

    pairs = np.argwhere(np.tril(mutual)).tolist()
    lines = [_way(places, j, i, radius) for i, j in pairs]
    widths = [width[others[i, j]] for i, j in pairs]
    axes.add_collection(LineCollection(lines, linewidths=widths, colors=INK, alpha=alpha, zorder=1))
    for hearer, heard in np.argwhere((others != 0) & ~mutual).tolist():
        path, head = Path(_way(places, heard, hearer, radius)), 9 if size <= 16 else 6
        arrow: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": head, "linewidth": width[others[hearer, heard]]}
        axes.add_patch(FancyArrowPatch(path=path, color=INK, alpha=alpha, zorder=1, **arrow))

    for rank, (x, y) in enumerate(places):
        idle = size > 1 and not others[rank].any() and not others[:, rank].any()
        color, style = (IDLE, ":") if idle else (INK, "-")
        circle = Circle((x, y), radius, facecolor="white", edgecolor=color, linewidth=1.1, linestyle=style, zorder=2)
        axes.add_patch(circle)
        label: dict[str, Any] = {"ha": "center", "va": "center", "color": color, "zorder": 3}
        if radius > 0.09:
            axes.text(x, y, str(rank), fontsize=8 + 10 * (radius - 0.1), **label)
        elif rank % ceil(size / 16) == 0 and hypot(x, y) > 0.9:  # no space in the circles: label some outside
            away = 1 + (radius + 0.09) / hypot(x, y)
            axes.text(away * x, away * y, str(rank), fontsize=7, **label)
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")
    axes.set_axis_off()


def _way(places: list[Place], start: int, end: int, radius: float) -> NDArray[np.float64]:
    """Return points of a line from one circle to the other, bent towards the centre if it would cross a third one."""
    ends, circles = np.array([places[start], places[end]]), np.delete(places, [start, end], axis=0)
    along = (ends[1] - ends[0]) / np.linalg.norm(ends[1] - ends[0])
    reach = np.clip((circles - ends[0]) @ along, 0, np.linalg.norm(ends[1] - ends[0]))
    beside = np.linalg.norm(ends[0] + reach[:, None] * along - circles, axis=1)
    middle = ends.mean(axis=0)
    if (beside < 1.1 * radius).any() and middle.any():
        middle = middle * (1 - 2.6 * radius / np.linalg.norm(middle))
    t = np.linspace(0, 1, 25)[:, None]
    curve = (1 - t) ** 2 * ends[0] + 2 * t * (1 - t) * middle + t**2 * ends[1]
    outside = np.linalg.norm(curve[:, None] - ends, axis=2).min(axis=1) > radius
    leaving = curve[[5, -6]] - ends
    on_circles = ends + radius * leaving / np.linalg.norm(leaving, axis=1, keepdims=True)
    return np.vstack([on_circles[0], curve[outside], on_circles[1]])


def _draw_matrix(axes: "Axes", mixing: NDArray[np.float64], shades: Any) -> Any:
    """Draw a matrix, whose rows hear its columns: weights as shades, and as fractions if it is small."""
    size = len(mixing)
    image = axes.imshow(mixing, cmap=SHADES, norm=shades)
    ticks = range(0, size, ceil(size / 8))
    axes.set(xticks=ticks, yticks=ticks)
    axes.tick_params(length=0, labelsize=8)
    axes.set_ylabel("rank", fontsize=8)
    axes.set_xlabel("hears rank", fontsize=8)
    if size <= 32:
        lines = np.arange(1, size) - 0.5
        axes.hlines(lines, -0.5, size - 0.5, colors=GRID, linewidth=0.5)
        axes.vlines(lines, -0.5, size - 0.5, colors=GRID, linewidth=0.5)
    if size <= SMALL:
        for i, j in np.argwhere(mixing).tolist():
            color = "white" if mixing[i, j] > 0.4 else "black"
            axes.text(j, i, _fraction(mixing[i, j]), ha="center", va="center", color=color, fontsize=11 - 0.5 * size)
    return image


def _fraction(weight: float) -> str:
    near = Fraction(weight).limit_denominator(64)
    return str(near) if abs(near - Fraction(weight)) < 1e-12 else f"{weight:.2f}"
