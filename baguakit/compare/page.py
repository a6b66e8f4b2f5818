"""The table and the picture of a comparison."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..pictures import PALE, blank, set_frame, style_of
from .compose import Row
from .contenders import DDP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER = (
    "| | lr | ms a step | MB a step | s to {0:.3f} | to {1:.3f} | to {2:.3f} "
    "| times as fast as DDP | MB to it | loss at {3} |"
)


def table(found: Sequence[Row], goals: Sequence[float], steps: int) -> list[str]:
    """Return the lines of a markdown table. `goals` are three losses; the last column has the loss after `steps`."""
    lines = [HEADER.format(*goals, steps), "|---" * 10 + "|"]
    for row in found:
        sent, final = row.bytes(goals[-1]) / 1e6, row.final(steps)
        cells = [row.contender.name, f"{row.lr:g}", f"{row.step * 1e3:.0f}", f"{row.sent / 1e6:.3f}"]
        cells += [*(time_to(row, goal) for goal in goals), gain(row, found, goals[-1])]
        in_all = f"{sent:,.1f}" if math.isfinite(sent) else "–"
        cells += [in_all, f"{final:.3f}" if math.isfinite(final) else "diverged"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def gain(row: Row, found: Sequence[Row], goal: float) -> str:
    """Return how many times as fast as DDP a row reaches a loss; a dash if it does not."""
    ddp = next((each.seconds(goal) for each in found if each.contender == DDP), math.nan)
    return f"{ddp / row.seconds(goal):.2f} ×" if math.isfinite(row.seconds(goal)) else "–"


def time_to(row: Row, goal: float) -> str:
    """Return the seconds to a loss and half their range over seeds; a dash for what was never reached."""
    if not math.isfinite(seconds := row.seconds(goal)):
        return "–"
    half = row.half_range(goal) if len(row.curves) > 1 else 0.0
    return f"{seconds:.0f}" + (f" ± {half:.0f}" if half else "").replace("inf", "–")


def draw(found: Sequence[Row], goal: float, title: str, label: str, paths: Sequence[Path]) -> None:
    """Draw the loss, called `label`, against seconds and bytes, and save the picture at each of `paths`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = blank(9, 4.5)
    left, right = figure.subplots(1, 2, sharey=True)
    panel(left, {row.contender.name: [(step * row.step, loss) for step, loss in row.curve()] for row in found})
    panel(right, {row.contender.name: [(step * row.sent / 1e6, loss) for step, loss in row.curve()] for row in found})
    for axes, words in ((left, "seconds"), (right, "MB sent by a rank")):
        axes.axhline(goal, color=PALE, linewidth=0.7, linestyle=":")
        axes.set_xlabel(words)
    left.set_ylabel(label)
    figure.suptitle(title, fontsize=10)
    set_frame(right)
    set_frame(left, "lower center", ncols=4)
    for path in paths:
        figure.savefig(path, dpi=150)


def panel(axes: "Axes", curves: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Draw curves by name over a logarithmic axis, each in the colour of its algorithm."""
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), label=name, linewidth=1.4, **style_of(name))
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
