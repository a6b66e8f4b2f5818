"""Consensus: how fast ranks approach their mean."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..arguments import checked
from ..topology import Topology
from .style import blank, line_style, quieten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 4096  # rounds of a period whose matrices are multiplied to know the gap
ROUNDING = 1e-8  # of the first distance: what is smaller is fp32's rounding


@checked
def consensus_decay(distances: Mapping[Topology, Sequence[float]], size: int) -> "Figure":
    """Draw measured distances from the mean by round, and beside each the line that the spectral gap promises.

        points   d_t = sqrt( (1/n) Σ_r ‖x_r − x̄‖² )  after t rounds
        line     ρ^t d_0,   ρ = 1 − topology.spectral_gap(n)

    The points of a static symmetric topology lie on or below its line. Where the mean is reached exactly after some
    rounds there is no line, and the legend says after how many.

    Args:
        distances: for each topology d_0, d_1, d_2 …; what is below 10⁻⁸ of the largest d_0 is drawn at the bottom.
        size: n, the number of ranks.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: nothing is given, or a distance is negative or not a number.
    """
    if not distances or not all(len(d) and all(x >= 0 for x in d) for d in distances.values()):
        raise ValueError(f"distances are numbers, 0 or more, some for each topology; not {dict(distances)!r}")
    bottom = ROUNDING * (max(d[0] for d in distances.values()) or 1.0)
    smallest = min(min(d) for d in distances.values())
    bottom = bottom if smallest < bottom else smallest / 3
    figure = blank(7.0, 3.9)
    axes = figure.subplots()
    for i, (topology, measured) in enumerate(distances.items()):
        style = line_style(i)
        rate, said = promise(topology, size)
        if rate is not None:
            promised = [(t, y) for t in range(len(measured)) if (y := measured[0] * rate**t) >= bottom]
            axes.plot(*zip(*promised, strict=True), color=style["color"], linestyle=style["linestyle"], linewidth=1)
            style["linestyle"] = "none"
        points = [max(x, bottom) for x in measured]
        axes.plot(range(len(points)), points, label=f"{topology!r}: {said}", clip_on=False, zorder=3, **style)
    axes.set(yscale="log", xlabel="rounds", ylabel="distance from the mean", xlim=(0, None))
    axes.set_ylim(bottom, None)
    axes.set_title(f"{size} ranks: measured (points) and ρᵗ (lines)", fontsize=10)
    axes.locator_params(axis="x", integer=True)
    quieten(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def promise(topology: Topology, size: int) -> tuple[float | None, str]:
    """The factor ρ of a round, or None if there is none to draw; and what to say of it."""
    if topology.period(size) > LONGEST:
        return None, "no promise for a round"
    if exact := topology.rounds_to_exactness(size):
        return None, f"exact after {exact}"
    rate = 1 - topology.spectral_gap(size)
    return rate, f"ρ = {rate:.3f}"
