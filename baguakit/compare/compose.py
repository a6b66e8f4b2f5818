"""Seconds and bytes to a loss: composed from losses by step, on loopback, and seconds by step, on a network.

The end of this file has their table and their picture.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..pictures import PALE, blank, set_frame, style_of
from .contenders import DDP, Contender
from .table import Table
from .trials import Comparison, best_rate

Curve = list[tuple[float, float]]  # (steps, loss)
SHARES = (0.25, 0.5, 1.0)  # of DDP's steps: its losses there are the targets
HEADER = (
    "| | lr | ms a step | MB a step | s to {0:.3f} | to {1:.3f} | to {2:.3f} "
    "| times as fast as DDP | MB to it | loss at {3} |"
)


@dataclass(frozen=True)
class Row:
    """A contender on a network. Its methods return infinity for a loss that was never reached."""

    contender: Contender
    step: float  # seconds of a step
    sent: float  # bytes of a rank in a step
    lr: float  # the learning rate that its trials chose
    curves: list[Curve]  # losses by step, of each seed; steps of free-running ranks are seconds divided by `step`

    def curve(self) -> Curve:
        return mean_of(self.curves)

    def seconds(self, target: float) -> float:
        return self.step * reached(self.curve(), target)

    def bytes(self, target: float) -> float:
        """Return the bytes that a rank sends to a loss."""
        return self.sent * reached(self.curve(), target)

    def half_range(self, target: float) -> float:
        """Return half the range over seeds of the seconds to a loss; infinity if one of them did not reach it."""
        steps = [reached(curve, target) for curve in self.curves]
        return self.step * (max(steps) - min(steps)) / 2 if all(map(math.isfinite, steps)) else math.inf

    def final(self, steps: int) -> float:
        """Return the loss after so many steps; of free-running ranks, that after all of theirs."""
        return self.curve()[-1][1] if self.contender.free else at(self.curve(), steps)


def mean_of(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves where all of them have a point, which is to the end of the shortest."""
    shortest = min(curves, key=len, default=[])
    return [(step, statistics.mean(at(curve, step) for curve in curves)) for step, _ in shortest]


def reached(curve: Curve, target: float) -> float:
    """Return where a curve, drawn as straight lines from point to point, first is as low as the target."""
    for (x, y), (later, lower) in itertools.pairwise(curve):
        if y <= target:
            return x
        if lower <= target:
            return x + (later - x) * (y - target) / (y - lower)
    return math.inf


def at(curve: Curve, x: float) -> float:
    """Return the loss at a step of the curve, or at the next one that it has; infinity if the training ended before."""
    return next((loss for step, loss in curve if step >= x), math.inf)


def curves(made: Comparison, table: Table, chosen: Contender) -> list[Curve]:
    """Return the losses by step of each whole training of a contender."""
    found = (table[cell] for job in made.whole(table, chosen) if (cell := made.cell(job)) in table)
    return [[(step, loss) for step, loss in each["losses"]] for each in found]


def targets(made: Comparison, table: Table) -> list[float]:
    """Return DDP's losses at some of its steps, the mean over its seeds."""
    known = mean_of(curves(made, table, DDP))
    return [at(known, share * made.steps) for share in SHARES if known]


def rows(made: Comparison, table: Table) -> list[Row]:
    """Return the contenders that have been trained and timed, in the order of the comparison."""
    found = []
    for each in made.contenders:
        known = curves(made, table, each)
        cell = made.cell(made.whole(table, each)[0] if each.free and known else made.timing(each))
        if known and all(known) and cell in table:
            sent = table[cell]["bytes" if each.free else "sent"]
            found.append(Row(each, table[cell]["step"], sent, best_rate(made.tried_rates(table, each)), known))
    return found


def table_of(found: Sequence[Row], goals: Sequence[float], steps: int) -> list[str]:
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
    """Draw the loss, called `label`, against seconds and bytes, and save the picture at each of `paths`."""
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
