"""Plots of the accuracy of training by the bytes sent."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..arguments import checked
from .style import blank, line_style, set_frame

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = Sequence[tuple[float, float]]


@checked
def score_by_bytes(curves: Mapping[str, Curve], score: str = "test accuracy") -> "Figure":
    """Draw the score of training runs by the bytes that a rank has sent: the best curves are high and far left.

    Args:
        curves: points (bytes sent so far, score) by name, in the order of training; one point is enough. The axis of
            bytes is logarithmic: a run that sends nothing is drawn as a horizontal line at its last score.
        score: the label of the score.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ValueError: a curve has no points.
    """
    if not curves or not all(curves.values()):
        raise ValueError(f"curves has at least one point (bytes, score) for each name; not {dict(curves)!r}")
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
    set_frame(axes)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    return figure
