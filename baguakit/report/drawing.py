"""A figure of a timeline: a row for training on each rank and one for each of its lanes; time runs to the right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..flights import BACKWARD, STEP

TRAINING = "training"
BESIDE = "between nodes"  # after the name of a lane: the one beside it


@dataclass(frozen=True)
class Span:
    """A stretch of time on one rank. Times are in seconds from the beginning of the timeline.

    Attributes:
        rank, thread: the thread is "training", or a lane such as "lane 0" or "lane 0 between nodes", the one beside it.
        name: of training "step"; "backward", from its first gradient, where a rule acts on gradients; "SGD.step", as
            the optimizer is called; "wait for …". Of a flight what it carries, such as "CompressedMean, bucket 3".
        start, end: of a flight, its work on the lane.
        step: of a flight, and of the wait for it, the step in which it was launched; None if it is free-running.
        rule, bucket, round: of a flight, and of the wait for it; None for other spans of training.
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

    @property
    def waits(self) -> bool:
        """Return True if training waited for a flight in this span."""
        return self.thread == TRAINING and self.rule is not None


@dataclass(frozen=True)
class FlightSpan(Span):
    """A flight, or one phase of it: launched ≤ start ≤ end ≤ landed.

    Attributes:
        launched: the time when training put it on the lane.
        landed: the time when training had its result.
    """

    launched: float = 0.0
    landed: float = 0.0


def flights_of(spans: Iterable[Span]) -> tuple[FlightSpan, ...]:
    """Return the flights among the spans."""
    return tuple(span for span in spans if isinstance(span, FlightSpan))


def covered(intervals: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """Return the length of a union of intervals within a window."""
    total, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            total, reached = total + end - start, end
    return total


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of Okabe and Ito (2008), which the colour-blind can tell apart; in grey print the hatches do.
RULES = (("#0072B2", ""), ("#E69F00", "////"), ("#009E73", "...."), ("#CC79A7", "\\\\\\\\"), ("#56B4E9", "xxxx"))
WAITING, IDLE, COMPUTING, STEPPING = "#D55E00", ("#ececec", "#dadada"), "#b0b0b0", "#303030"
TOP, TALL = 0.1, 0.8  # of a bar in its row
WIDEST = 84  # letters of a rule in the legend
LABEL = 0.07  # share of the width of the figure that the number of a step takes
READABLE = 0.022  # share of the width of the figure that a bar with a number needs

Row = tuple[int, str]
Style = tuple[str, str]  # colour and hatch


def draw(ranks: int, spans: Sequence[Span], window: tuple[float, float], hidden: float) -> "Figure":
    """Return the figure of `Timeline.draw`.

    Args:
        ranks: the number of ranks.
        spans: of all ranks.
        window: when the figure begins and ends.
        hidden: the share of communication that is hidden, of `Timeline.overlap`; NaN if nothing flew.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError("drawing a timeline needs matplotlib: pip install matplotlib") from missing

    begin, end = window
    seen = [span for span in spans if in_sight(span, begin, end)]
    rows = places(seen)
    rules = list(dict.fromkeys(flight.rule or "" for flight in flights_of(spans)))
    styles = {rule: RULES[i % len(RULES)] for i, rule in enumerate(rules)}

    figure = Figure(figsize=(10, 1.8 + 0.28 * max(rows.values()) + 0.2 * max(0, len(rules) - 4)), layout="constrained")
    axes = figure.subplots()
    for row, y in rows.items():
        here = [span for span in seen if (span.rank, span.thread) == row]
        if row[1] == TRAINING:
            draw_training(axes, y, here, begin)
        else:
            draw_lane(axes, y, flights_of(here), styles, begin, end)
    draw_frame(axes, rows, seen, begin, end)
    draw_legend(figure, {rule: style for rule, style in styles.items() if any(s.rule == rule for s in seen)}, seen)
    share = "" if hidden != hidden else f"; {100 * hidden:.0f} % of communication hidden"
    figure.suptitle(f"{ranks} ranks{share}", fontsize=10)
    return figure


def in_sight(span: Span, begin: float, end: float) -> bool:
    """Return True if a part of a span, or of a flight from launch to landing, lies in the window."""
    first, last = (span.launched, span.landed) if isinstance(span, FlightSpan) else (span.start, span.end)
    return first < end and last > begin


def places(spans: Iterable[Span]) -> dict[Row, float]:
    """Return the places of rows from the top down: for each rank training, then its lanes, then a gap."""
    rows = sorted({(span.rank, span.thread) for span in spans}, key=lambda row: (row[0], row[1] != TRAINING, row[1]))
    return {row: i + 0.5 * row[0] for i, row in enumerate(rows)}


def bars(spans: Iterable[Span], begin: float) -> list[tuple[float, float]]:
    """Return the beginnings and lengths of spans in ms."""
    return [(1e3 * (span.start - begin), 1e3 * (span.end - span.start)) for span in spans]


def draw_training(axes: "Axes", y: float, spans: Sequence[Span], begin: float) -> None:
    """Draw steps in two alternating greys, their parts in darker ones, and the waits on top."""
    place = (y + TOP, TALL)
    steps = [span for span in spans if span.name == STEP]
    for shade in (0, 1):
        axes.broken_barh(
            [*bars((s for s in steps if (s.step or 0) % 2 == shade), begin)], place, facecolors=IDLE[shade]
        )
    known = [span for span in spans if span.name != STEP and not span.waits]
    axes.broken_barh(bars((s for s in known if s.name == BACKWARD), begin), place, facecolors=COMPUTING)
    axes.broken_barh(bars((s for s in known if s.name != BACKWARD), begin), place, facecolors=STEPPING)
    axes.broken_barh(bars((s for s in spans if s.waits), begin), place, facecolors=WAITING)


def draw_lane(
    axes: "Axes", y: float, flights: Sequence[FlightSpan], styles: dict[str, Style], begin: float, end: float
) -> None:
    """Draw the work of flights as bars with the number of their bucket, and a line from launch to landing."""
    for rule, (colour, hatch) in styles.items():
        ours = [flight for flight in flights if flight.rule == rule]
        if not ours:
            continue
        look: dict[str, Any] = {"facecolors": colour, "edgecolors": "white", "hatch": hatch, "linewidth": 0}
        axes.broken_barh(bars(ours, begin), (y + TOP, TALL), zorder=2, **look)
        ways = [(1e3 * (f.launched - begin), 1e3 * (f.landed - begin)) for f in ours]
        since, until = zip(*ways, strict=True)
        axes.hlines([y + 0.5] * len(ours), since, until, colors=colour, linewidth=1, zorder=1)
        wide = [x for x, width in bars(ours, begin) if width > 4 * (end - begin)]  # 0.4 % of the picture
        axes.vlines(wide, y + TOP, y + TOP + TALL, colors="white", linewidth=0.8, zorder=2)
        for flight in ours:
            if min(flight.end, end) - max(flight.start, begin) > READABLE * (end - begin):
                x = 1e3 * ((max(flight.start, begin) + min(flight.end, end)) / 2 - begin)
                box: dict[str, Any] = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
                ink = "white" if colour == RULES[0][0] else "black"
                text: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 7, "color": ink, "bbox": box}
                axes.text(x, y + 0.5, str(flight.bucket), zorder=3, **text)


def draw_frame(axes: "Axes", rows: dict[Row, float], spans: Iterable[Span], begin: float, end: float) -> None:
    """Draw the axes, with the numbers of rank 0's steps above."""
    axes.set_xlim(0, 1e3 * (end - begin))
    axes.set_ylim(max(rows.values()) + 1, 0)
    axes.set_yticks([y + 0.5 for y in rows.values()])
    axes.set_yticklabels([f"rank {rank}  {thread}" if thread == TRAINING else thread for rank, thread in rows])
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelsize=8)
    axes.set_xlabel("ms", fontsize=8)
    for side in ("top", "left", "right"):
        axes.spines[side].set_visible(False)
    steps = [s for s in spans if s.rank == 0 and s.thread == TRAINING and s.name == STEP and s.start >= begin]
    above = axes.secondary_xaxis("top")
    shown: list[Span] = []
    for s in steps:  # none covers another
        if not shown or s.start - shown[-1].start > LABEL * (end - begin):
            shown.append(s)
    above.set_xticks([1e3 * (s.start - begin) for s in shown], [f"step {s.step}" for s in shown], ha="left")
    above.tick_params(length=4, labelsize=8)
    above.spines["top"].set_visible(False)


def draw_legend(figure: "Figure", styles: dict[str, Style], spans: Iterable[Span]) -> None:
    """Draw the legend of colours: of training on the left, of the rules on the right."""
    from matplotlib.patches import Patch

    training = [
        Patch(facecolor=IDLE[1], label="training: forward and all else"),
        *[Patch(facecolor=COMPUTING, label="backward")] * any(span.name == BACKWARD for span in spans),
        Patch(facecolor=STEPPING, label="optimizer"),
        Patch(facecolor=WAITING, label="waiting for a flight"),
    ]
    rules = [
        Patch(facecolor=colour, edgecolor="white", hatch=hatch, label=shortened(rule))
        for rule, (colour, hatch) in styles.items()
    ]
    for column in (training, rules):
        column += [Patch(alpha=0, label="")] * (max(len(training), len(rules)) - len(column))
    figure.legend(handles=[*training, *rules], loc="outside lower center", ncols=2, fontsize=8, frameon=False)


def shortened(rule: str) -> str:
    """Return the label of a rule, without the middle if it is long."""
    return rule if len(rule) <= WIDEST else f"{rule[: WIDEST // 2]} … {rule[-WIDEST // 2 :]}"
