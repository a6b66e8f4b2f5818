"""A topology drawn: who hears whom, and the mixing matrix, round by round."""

from fractions import Fraction
from math import ceil, dist, hypot
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .base import Topology

Place = tuple[float, float]

# One hue from white to dark reads the same to every eye, and on paper.
SHADES, INK, IDLE, GRID = "Blues", "#0b3c6f", "#8a8a8a", "#c8c8c8"
MOST_ROUNDS, MOST_ACROSS, MOST_DRAWN = 8, 5, 256
SMALL = 8  # up to so many ranks, weights are written as fractions; above, a bar tells the shades


def draw(topology: "Topology", size: int, rounds: int | None = None) -> "Figure":
    """The figure of `Topology.draw`: each round's graph above its matrix, or beside it where there is one round."""
    try:
        from matplotlib.colors import PowerNorm
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("drawing a topology needs matplotlib: pip install matplotlib") from missing

    period = topology.period(size)
    count = min(period, MOST_ROUNDS) if rounds is None else rounds
    whole("rounds", count, 1, MOST_DRAWN)
    matrices = [topology.matrix(size, round) for round in range(count)]

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

    # Square roots, so that 1/n can be told from 0.
    shades = PowerNorm(0.5, vmin=0, vmax=1 if size <= SMALL else 1.2 * max(float(w.max()) for w in matrices))
    for round, (mixing, (graph, table)) in enumerate(zip(matrices, pairs, strict=True)):
        if count > 1:
            graph.set_title(f"round {round}", fontsize=10)
        _draw_graph(graph, topology.layout(size), mixing)
        image = _draw_matrix(table, mixing, shades)
    if size > SMALL:
        figure.colorbar(image, ax=[table for _, table in pairs], shrink=0.75, label="weight", pad=0.02, format="%.2g")
    figure.suptitle(_title(topology, size, count, period), fontsize=11)
    return figure


def _title(topology: "Topology", size: int, count: int, period: int) -> str:
    name, exact = repr(topology), topology.rounds_to_exactness(size)
    short = name if len(name) <= 40 else f"{type(topology).__name__}(…)"
    if period == 1:
        facts = "the same in every round"
    elif count >= period:
        facts = f"repeats after {period} rounds"
    else:
        facts = f"first {count} rounds" + (f" of {period}" if period < 1 << 32 else "")
    if exact:
        facts += f" · exact after {exact}" if period > 1 else " · exact after one"
    return f"{short} on {size} rank{'s' * (size > 1)}\n{facts}"


def _draw_graph(axes: "Axes", places: list[Place], mixing: NDArray[np.float64]) -> None:
    """Lines between those who hear each other alike, else arrows to the hearer; thicker for more weight."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle, FancyArrowPatch
    from matplotlib.path import Path

    size = len(places)
    radius = min(0.2, 0.38 * min((dist(a, b) for i, a in enumerate(places) for b in places[:i]), default=1.0))
    others = mixing - np.diag(np.diag(mixing))
    crowd = min(1.0, 50 / max(1, int(np.count_nonzero(others))))  # many links are drawn thin and pale
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
        color = IDLE if idle else INK
        line: dict[str, Any] = {
            "facecolor": "white",
            "edgecolor": color,
            "linewidth": 1.1,
            "linestyle": ":" if idle else "-",
        }
        axes.add_patch(Circle((x, y), radius, zorder=2, **line))
        label: dict[str, Any] = {"ha": "center", "va": "center", "color": color, "zorder": 3}
        if radius > 0.09:
            axes.text(x, y, str(rank), fontsize=8 + 10 * (radius - 0.1), **label)
        elif rank % ceil(size / 16) == 0 and hypot(x, y) > 0.9:  # no room inside: some, outside
            away = 1 + (radius + 0.09) / hypot(x, y)
            axes.text(away * x, away * y, str(rank), fontsize=7, **label)
    axes.set_xlim(-1.25, 1.25)
    axes.set_ylim(-1.25, 1.25)
    axes.set_aspect("equal")
    axes.set_axis_off()


def _way(places: list[Place], start: int, end: int, radius: float) -> NDArray[np.float64]:
    """Points of a line from one circle to the other, bent towards the middle where another circle is in the way."""
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
    """Rows hear columns: the weights as shades, and as fractions where there is room."""
    size = len(mixing)
    image = axes.imshow(mixing, cmap=SHADES, norm=shades)
    ticks = range(0, size, ceil(size / 8))
    axes.set_xticks(ticks)
    axes.set_yticks(ticks)
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
