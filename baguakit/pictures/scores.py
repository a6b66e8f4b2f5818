"""Pictures of the accuracy that training reaches for the bytes that it sends."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..arguments import checked
from .style import blank, line_style, quieten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]


@checked
def score_by_bytes(curves: Mapping[str, Curve], score: str = "test accuracy") -> "Figure":
    """Draw how far each way of training has come, by the bytes that a rank has sent: further up and left is better.

    Args:
        curves: for each name points (bytes sent so far, score) in the order of training; one point is enough. A way
            that sends nothing has no place on a logarithmic axis: the score that it ends with is drawn as a level.
        score: what the score is called.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: a curve has no points.
    """
    if not curves or not all(curves.values()):
        raise ValueError(f"a curve has points (bytes, score), and there is at least one; not {dict(curves)!r}")
    figure = blank(7.5, 3.9)
    from matplotlib.ticker import EngFormatter

    axes = figure.subplots()
    for i, (name, points) in enumerate(curves.items()):
        sending = [point for point in points if point[0] > 0]
        if sending:
            axes.plot(*zip(*sending, strict=True), label=name, **line_style(i))
        else:
            style = {**line_style(i), "linestyle": (0, (1, 2)), "marker": ""}
            axes.axhline(points[-1][1], label=f"{name} (sends nothing)", **style)
    axes.set(xscale="log", xlabel="sent by a rank", ylabel=score)
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    quieten(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    return figure
