"""Plots of consensus: the distance of ranks from their mean."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ..arguments import checked
from ..topology import Topology
from .style import blank, line_style, set_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 4096  # rounds of the longest period for which the spectral gap is computed
ROUNDING = 1e-8  # of the first distance: smaller distances are rounding errors of fp32


@checked
def consensus_decay(distances: Mapping[Topology, Sequence[float]], size: int) -> "Figure":
    """Draw measured distances from the mean by round, with the decay that the spectral gap gives.

        points   d_t = sqrt( (1/n) Σ_r ‖x_r − x̄‖² )  after t rounds
        line     ρ^t d_0,   ρ = 1 − topology.spectral_gap(n)

    The points of a static symmetric topology lie on or below its line. A topology that reaches the exact mean has no
    line; the legend gives the number of rounds.

    Args:
        distances: d_0, d_1, d_2 … by topology. A distance below 10⁻⁸ of the largest d_0 is a rounding error: it has no
            point, and a line falls to the bottom at the first of them.
        size: n, the number of ranks.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: `distances` is empty, or a distance is negative or not a number.
    """
    if not distances or not all(len(d) and all(x >= 0 for x in d) for d in distances.values()):
        raise ValueError(f"distances has numbers, 0 or more, for each topology; not {dict(distances)!r}")
    bottom = ROUNDING * (max(d[0] for d in distances.values()) or 1.0)
    smallest = min(min(d) for d in distances.values())
    bottom = bottom if smallest < bottom else smallest / 3
    figure = blank(7.0, 3.9)
    axes = figure.subplots()
    for i, (topology, measured) in enumerate(distances.items()):
        style = line_style(i)
        rate, label = decay(topology, size)
        if rate is not None:
            promised = [(t, y) for t in range(len(measured)) if (y := measured[0] * rate**t) >= bottom]
            axes.plot(*zip(*promised, strict=True), color=style["color"], linestyle=style["linestyle"], linewidth=1)
            style["linestyle"] = "none"
        points = [x if x >= bottom else float("nan") for x in measured]
        axes.plot(range(len(points)), points, label=f"{topology!r}: {label}", clip_on=False, zorder=3, **style)
        for t, (before, after) in enumerate(pairwise(measured)):
            if before >= bottom > after:
                axes.plot([t, t + 1], [before, bottom], color=style["color"], linestyle="--", linewidth=1)
    axes.set(yscale="log", xlabel="rounds", ylabel="distance from the mean", xlim=(0, None), ylim=(bottom, None))
    axes.set_title(f"{size} ranks: measured (points) and ρᵗ (lines)", fontsize=10)
    axes.locator_params(axis="x", integer=True)
    set_frame(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def decay(topology: Topology, size: int) -> tuple[float | None, str]:
    """Return the factor ρ of a round, or None if there is no line to draw, and its label."""
    if topology.period(size) > LONGEST:
        return None, "no bound for a round"
    if exact := topology.rounds_to_exactness(size):
        return None, f"exact after {exact}"
    rate = 1 - topology.spectral_gap(size)
    return rate, f"ρ = {rate:.3f}"
