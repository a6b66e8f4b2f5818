"""The figure of a timeline: for each rank a row for training and a row for each lane; time runs to the right."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from math import nan
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ..flights import BACKWARD, STEP

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = "training"
BESIDE = "beside"  # the lane beside a lane is named after it, with this word at the end


@dataclass(frozen=True)
class Span:
    """A stretch of time on one rank. Times are in seconds from the beginning of the timeline.

    Attributes:
        rank, thread: the rank, and "training" or a lane: "lane 0", or "lane 0 beside" for the lane beside it.
        name: a span of training is called "step", "backward" (from its first gradient, if a rule acts on gradients),
            "SGD.step" (with the optimizer's class) or "wait for …"; a flight, for example, "CompressedMean, bucket 3".
        start, end: when the span begins and ends. A span of a flight is its work on the lane, or a phase of this work.
        step: the step; for a flight and the wait for it, the step of its launch; None if the rule is free-running.
        rule, bucket, round: those of a flight or of a wait for it; None for other spans of training.
        launched, landed: when training launched a flight, and had its result; for other spans, `start` and `end`.
    """

    rank: int
    thread: str
    name: str
    start: float
    end: float
    step: int | None
    rule: str | None = None
    bucket: int | None = None
    round: int | None = None
    launched: float = nan
    landed: float = nan

    def __post_init__(self) -> None:
        if not self.flies:
            object.__setattr__(self, "launched", self.start)
            object.__setattr__(self, "landed", self.end)

    @property
    def flies(self) -> bool:
        """Return True for a flight, or a phase of one."""
        return self.thread != TRAINING

    @property
    def waits(self) -> bool:
        """Return True if training waited for a flight in this span."""
        return self.rule is not None and not self.flies


# {label: (colour, hatch)}; later bars are drawn on top. The colour-blind can tell these colours apart (Okabe and Ito,
# 2008). In grey print, the hatches tell rules apart.
FORWARD, OPTIMIZER, WAITING = "training: forward and all else", "optimizer", "waiting for a flight"
TRAINS = {FORWARD: ("#dadada", ""), BACKWARD: ("#b0b0b0", ""), OPTIMIZER: ("#303030", ""), WAITING: ("#D55E00", "")}
RULES = (("#0072B2", ""), ("#E69F00", "////"), ("#009E73", "...."), ("#CC79A7", "\\\\\\\\"), ("#56B4E9", "xxxx"))
EDGED, READABLE = 0.004, 0.022  # shares of the figure's width: of a bar with a white edge, and of one with a number
MOST_STEPS, WIDEST = 12, 84  # steps that are numbered, and letters of a line of the legend


def label_of(span: Span) -> str:
    """Return the text that explains the colour of a span in the legend."""
    if span.rule is None:
        return {STEP: FORWARD, BACKWARD: BACKWARD}.get(span.name, OPTIMIZER)
    return WAITING if span.waits else fill(span.rule, WIDEST)


def draw(ranks: int, spans: Sequence[Span], window: tuple[float, float], hidden: float) -> "Figure":
    """Return the figure of `Timeline.draw` for `window`. Its title has `hidden`, the hidden share of communication."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("drawing a timeline needs matplotlib: pip install matplotlib") from missing

    begin, length = window[0], 1e3 * (window[1] - window[0])  # in s and ms
    seen = [span for span in spans if span.launched < window[1] and span.landed > begin]
    threads = sorted({(span.rank, span.thread) for span in seen}, key=lambda row: (row[0], row[1] != TRAINING, row[1]))
    rows = {row: i + 0.5 * row[0] for i, row in enumerate(threads)}  # from the top down, with a gap after each rank
    rules = dict.fromkeys(label_of(span) for span in spans if span.flies)
    figure = Figure(figsize=(10, 1.8 + 0.28 * max(rows.values()) + 0.2 * max(0, len(rules) - 4)), layout="constrained")
    axes = figure.subplots()
    for label, (colour, hatch) in (TRAINS | dict(zip(rules, cycle(RULES), strict=False))).items():
        if not (alike := [span for span in seen if label_of(span) == label]):
            continue
        y = [rows[span.rank, span.thread] for span in alike]
        since, until, launched, landed = (
            [1e3 * (getattr(span, name) - begin) for span in alike] for name in ("start", "end", "launched", "landed")
        )
        widths = [b - a for a, b in zip(since, until, strict=True)]
        look: Any = {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "label": label, "zorder": 2}
        bars = axes.barh(y, widths, 0.8, since, linewidth=[0.8 * (w > EDGED * length) for w in widths], **look)
        if alike[0].flies:
            axes.hlines(y, launched, landed, colors=colour, linewidth=1, zorder=1)
            numbers = [str(s.bucket) * (w > READABLE * length) for s, w in zip(alike, widths, strict=True)]
            text: Any = {"color": "white" if colour == RULES[0][0] else "black", "fontsize": 7, "zorder": 3}
            axes.bar_label(bars, numbers, label_type="center", bbox={"facecolor": colour, "lw": 0, "pad": 0.8}, **text)
    axes.set_yticks([*rows.values()], [f"rank {r}  {on}" if on == TRAINING else on for r, on in rows])
    axes.set(xlim=(0, length), ylim=(max(rows.values()) + 0.5, -0.5), xlabel="ms")
    steps = [span for span in seen if span.rank == 0 and span.name == STEP and span.start >= begin]
    steps = steps[:: 1 + len(steps) // MOST_STEPS]
    above = axes.secondary_xaxis("top")
    above.set_xticks([1e3 * (span.start - begin) for span in steps], [f"step {span.step}" for span in steps], ha="left")
    above.spines[:].set_visible(False)
    axes.spines[["top", "left", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    share = "" if hidden != hidden else f"; {100 * hidden:.0f} % of communication hidden"
    figure.suptitle(f"{ranks} ranks{share}", fontsize=10)
    return figure
