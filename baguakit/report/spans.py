"""Spans: the times of training and of flights on each rank, and sums over them."""

from collections.abc import Iterable
from dataclasses import dataclass

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
