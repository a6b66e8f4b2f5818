"""The table and the picture of a comparison."""

import math
from collections.abc import Sequence
from pathlib import Path

from ..pictures import PALE, blank, set_frame, style_of
from .compose import Row
from .contenders import DDP

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
    panels = figure.subplots(1, 2, sharey=True)
    for axes, words, part in zip(panels, ("seconds", "MB sent by a rank"), ("step", "sent"), strict=True):
        for row in found:
            each = getattr(row, part) / (1e6 if part == "sent" else 1)
            steps, losses = zip(*row.curve(), strict=True)
            style = style_of(row.contender.name)
            axes.plot([each * step for step in steps], losses, label=row.contender.name, linewidth=1.4, **style)
        axes.axhline(goal, color=PALE, linewidth=0.7, linestyle=":")
        axes.set(xlabel=words, xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        set_frame(axes, "lower center" if axes is panels[0] else "", ncols=4)
    panels[0].set_ylabel(label)
    figure.suptitle(title, fontsize=10)
    for path in paths:
        figure.savefig(path, dpi=150)
