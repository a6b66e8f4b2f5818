"""The picture of the demo: the loss by the time at a rate, of at most six algorithms, each labelled at its curve."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ...pictures.style import COLOURS, blank, set_frame
from ..pacing.rates import written
from .outcome import BY_NAME, Clock
from .training import Result

MOST = 6  # curves
APART = 0.06  # of the height: the least distance of two labels


def draw(results: Sequence[Result], clock: Clock, ranks: int, path: Path) -> None:
    """Draw the curves of the results that say most, and save the picture."""
    sending = [each for each in results if each.sent]
    shown = sending if len(sending) <= MOST else [each for each in sending if BY_NAME[each.contender].telling]
    figure = blank(8, 4.2)
    axes = figure.subplots()
    ends = []
    for each, colour in zip(shown, COLOURS, strict=False):
        times = [clock.until(point.sent, point.seconds) for point in each.curve]
        losses = [point.loss for point in each.curve]
        axes.plot(times, losses, color=colour, marker="o", markersize=3, linewidth=1.5)
        ends.append((times[-1], losses[-1], each.contender, colour))
    how = "measured" if clock.paced else "computed from measured bytes"
    axes.set(xscale="log", yscale="log", ylabel="test loss of the mean of the networks")
    axes.set_xlabel(f"seconds of training at {written(clock.bits)}, {how}")
    axes.set_title(f"Printed digits on {ranks} ranks, rank r sees those with d mod {ranks} = r", fontsize="medium")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    set_frame(axes)
    figure.draw_without_rendering()  # places of data in the axes are known from here on
    places = [axes.transAxes.inverted().transform(axes.transData.transform((x, y))) for x, y, *_ in ends]
    for (x, y, name, colour), height in zip(ends, spread([place[1] for place in places]), strict=True):
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6}
        axes.annotate(
            name,
            (x, y),
            xytext=(1.02, height),
            textcoords="axes fraction",
            color=colour,
            va="center",
            fontsize=9,
            arrowprops=line,
            annotation_clip=False,
        )
    figure.savefig(path, dpi=150)


def spread(heights: Sequence[float]) -> list[float]:
    """Return the heights of labels, moved up so that no two are closer than `APART`."""
    placed = list(heights)
    order = sorted(range(len(heights)), key=heights.__getitem__)
    for below, above in pairwise(order):
        placed[above] = max(placed[above], placed[below] + APART)
    return placed
