"""The figure of a timeline: for each rank a row for training and a row for each lane; time runs to the right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

from ..flights import BACKWARD, STEP

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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


# The colour-blind can tell these colours apart (Okabe and Ito, 2008). In grey print, the hatches tell rules apart.
RULES = (("#0072B2", ""), ("#E69F00", "////"), ("#009E73", "...."), ("#CC79A7", "\\\\\\\\"), ("#56B4E9", "xxxx"))
WAITING, IDLE, COMPUTING, STEPPING = "#D55E00", ("#ececec", "#dadada"), "#b0b0b0", "#303030"
TOP, TALL = 0.1, 0.8  # of a bar in its row
WIDEST = 84  # letters of a rule in the legend
LABEL = 0.07  # share of the width of the figure that the number of a step takes
READABLE = 0.022  # share of the width of the figure that a bar with a number needs

Style = tuple[str, str]  # colour and hatch


def draw(ranks: int, spans: Sequence[Span], window: tuple[float, float], hidden: float) -> "Figure":
    """Return the figure of `Timeline.draw` for `window`. Its title has `hidden`, the hidden share of communication."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("drawing a timeline needs matplotlib: pip install matplotlib") from missing

    seen = [span for span in spans if span.launched < window[1] and span.landed > window[0]]
    threads = sorted({(span.rank, span.thread) for span in seen}, key=lambda row: (row[0], row[1] != TRAINING, row[1]))
    rows = {row: i + 0.5 * row[0] for i, row in enumerate(threads)}  # from the top down, with a gap after each rank
    rules = list(dict.fromkeys(span.rule or "" for span in spans if span.flies))
    styles = {rule: RULES[i % len(RULES)] for i, rule in enumerate(rules)}

    figure = Figure(figsize=(10, 1.8 + 0.28 * max(rows.values()) + 0.2 * max(0, len(rules) - 4)), layout="constrained")
    axes = figure.subplots()
    for row, y in rows.items():
        here = [span for span in seen if (span.rank, span.thread) == row]
        if row[1] == TRAINING:
            for shade in (*IDLE, COMPUTING, STEPPING, WAITING):  # the waits on top
                bars = _bars((span for span in here if _shade(span) == shade), window[0])
                axes.broken_barh(bars, (y + TOP, TALL), facecolors=shade)
        for rule, style in styles.items() if row[1] != TRAINING else ():
            _draw_flights(axes, y, [flight for flight in here if flight.rule == rule], style, *window)
    axes.set_yticks([y + 0.5 for y in rows.values()])
    axes.set_yticklabels([f"rank {rank}  {thread}" if thread == TRAINING else thread for rank, thread in rows])
    axes.set_ylim(max(rows.values()) + 1, 0)
    _draw_frame(axes, [s for s in seen if s.rank == 0 and s.name == STEP and s.start >= window[0]], *window)
    _draw_legend(figure, {rule: style for rule, style in styles.items() if any(s.rule == rule for s in seen)}, seen)
    share = "" if hidden != hidden else f"; {100 * hidden:.0f} % of communication hidden"
    figure.suptitle(f"{ranks} ranks{share}", fontsize=10)
    return figure


def _bars(spans: Iterable[Span], begin: float) -> list[tuple[float, float]]:
    """Return (begin, length) of each span, in ms."""
    return [(1e3 * (span.start - begin), 1e3 * (span.end - span.start)) for span in spans]


def _shade(span: Span) -> str:
    """Return the colour of a span of training. Steps alternate between two greys; waits are red, other parts darker."""
    if span.name == STEP:
        return IDLE[(span.step or 0) % 2]
    return WAITING if span.waits else COMPUTING if span.name == BACKWARD else STEPPING


def _draw_flights(axes: "Axes", y: float, flights: Sequence[Span], style: Style, begin: float, end: float) -> None:
    """Draw each flight: its work as a bar with the number of the bucket, and a line from launch to landing."""
    if not flights:
        return
    (colour, hatch), bars = style, _bars(flights, begin)
    look: dict[str, Any] = {"facecolors": colour, "edgecolors": "white", "hatch": hatch, "linewidth": 0}
    axes.broken_barh(bars, (y + TOP, TALL), zorder=2, **look)
    since, until = zip(*((1e3 * (f.launched - begin), 1e3 * (f.landed - begin)) for f in flights), strict=True)
    axes.hlines([y + 0.5] * len(flights), since, until, colors=colour, linewidth=1, zorder=1)
    wide = [x for x, width in bars if width > 4 * (end - begin)]  # 0.4 % of the picture
    axes.vlines(wide, y + TOP, y + TOP + TALL, colors="white", linewidth=0.8, zorder=2)
    box: dict[str, Any] = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
    ink = "white" if colour == RULES[0][0] else "black"
    text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": ink, "bbox": box, "zorder": 3}
    for flight in flights:
        first, last = max(flight.start, begin), min(flight.end, end)
        if last - first > READABLE * (end - begin):
            axes.text(1e3 * ((first + last) / 2 - begin), y + 0.5, str(flight.bucket), **text)


def _draw_frame(axes: "Axes", steps: Iterable[Span], begin: float, end: float) -> None:
    axes.set_xlim(0, 1e3 * (end - begin))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("ms", fontsize=8)
    axes.spines[["top", "left", "right"]].set_visible(False)
    above = axes.secondary_xaxis("top")
    shown: list[Span] = []
    for s in steps:  # none covers another
        if not shown or s.start - shown[-1].start > LABEL * (end - begin):
            shown.append(s)
    above.set_xticks([1e3 * (s.start - begin) for s in shown], [f"step {s.step}" for s in shown], ha="left")
    above.tick_params(length=4, labelsize=8)
    above.spines["top"].set_visible(False)


def _draw_legend(figure: "Figure", styles: dict[str, Style], spans: Iterable[Span]) -> None:
    from matplotlib.patches import Patch

    training = {IDLE[1]: "training: forward and all else", COMPUTING: "backward", STEPPING: "optimizer"}
    if not any(span.name == BACKWARD for span in spans):
        del training[COMPUTING]
    left = [Patch(facecolor=c, label=label) for c, label in {**training, WAITING: "waiting for a flight"}.items()]
    right = []
    for rule, (colour, hatch) in styles.items():
        label = rule if len(rule) <= WIDEST else f"{rule[: WIDEST // 2]} … {rule[-WIDEST // 2 :]}"
        right.append(Patch(facecolor=colour, edgecolor="white", hatch=hatch, label=label))
    for column in (left, right):
        column += [Patch(alpha=0, label="")] * (max(len(left), len(right)) - len(column))
    figure.legend(handles=[*left, *right], loc="outside lower center", ncols=2, fontsize=8, frameon=False)
