"""A timeline of all ranks: training, the flights on its lanes, and where it waited for them."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...arguments import checked
from .logbook import STEP
from .trace import save_trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TRAINING = "training"


@dataclass(frozen=True)
class Span:
    """Something that took time on one rank. Times are in seconds from the beginning of the timeline.

    Attributes:
        rank, thread: where: "training", or a lane such as "lane 0".
        name: of training "step"; "backward", from its first gradient, where a rule acts on gradients; "SGD.step", as
            the optimizer is called; "wait for …". Of a flight what it carries, such as "CompressedMean, bucket 3".
        start, end: of a flight, its work on the lane.
        step: of a flight, and of the wait for it, the step in which it was launched; None if it is free-running.
        rule, bucket, round: of a flight, and of the wait for it; None for what else training does.
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
        """Whether training stood still here for a flight."""
        return self.thread == TRAINING and self.rule is not None


@dataclass(frozen=True)
class FlightSpan(Span):
    """A flight: launched ≤ start ≤ end ≤ landed.

    Attributes:
        launched: when training put it on the lane.
        landed: when training had what it brought.
    """

    launched: float = 0.0
    landed: float = 0.0


@dataclass(frozen=True, repr=False)
class Timeline:
    """A timeline of all ranks; made by `Attachment.timeline`.

    Attributes:
        ranks: how many.
        spans: in the order of ranks and times. On one thread of one rank they nest or lie apart.
        error: seconds by which the clocks of two ranks may be apart here; their offsets were measured.
    """

    ranks: int
    spans: tuple[Span, ...]
    error: float

    @property
    def flights(self) -> tuple[FlightSpan, ...]:
        """The flights among the spans."""
        return tuple(span for span in self.spans if isinstance(span, FlightSpan))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of rank 0, by number."""
        return tuple(step for step, _, _ in self._steps())

    def _steps(self) -> list[tuple[int, float, float]]:
        ours = (s for s in self.spans if s.rank == 0 and s.thread == TRAINING)
        return [(s.step, s.start, s.end) for s in ours if s.name == STEP and s.step is not None]

    def window(self, steps: slice | None = None) -> tuple[float, float]:
        """From when to when rank 0 was in some steps: a slice of their numbers, counted from the end where negative.

        Raises:
            ValueError: there is no such step, or none at all.
            TypeError: `steps` is no slice.
        """
        if not (known := self._steps()):
            raise ValueError(
                "nothing has been recorded: a timeline needs two ranks or more, and a whole optimizer step"
            )
        if steps is None:
            steps = slice(None)
        if not isinstance(steps, slice) or steps.step is not None:
            raise TypeError(f"steps= is a slice such as slice(10, 14) or slice(-3, None), not {steps!r}")
        first, last = known[0][0], known[-1][0]
        begin, end = ((None if at is None else last + 1 + at if at < 0 else at) for at in (steps.start, steps.stop))
        chosen = [s for s in known if (begin is None or s[0] >= begin) and (end is None or s[0] < end)]
        if not chosen:
            raise ValueError(f"steps {first} to {last} have been recorded, and none of them is in {steps!r}")
        return chosen[0][1], chosen[-1][2]

    def overlap(self, steps: slice | None = None) -> float:
        """The part of the time with a flight under way, from launch to landing, in which training did not wait.

        Over all ranks, and over the time in which rank 0 was in these steps. 1: nothing was exposed; NaN: nothing flew.
        """
        window = self.window(steps)
        away = waiting = 0.0
        for rank in range(self.ranks):
            away += covered(((s.launched, s.landed) for s in self.flights if s.rank == rank), window)
            waiting += covered(((s.start, s.end) for s in self.spans if s.rank == rank and s.waits), window)
        return 1 - waiting / away if away else float("nan")

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a trace that https://ui.perfetto.dev and chrome://tracing open. All ranks hold the same: one may save.

        Each rank is a process with a thread for training and one for each lane; arrows go from where a flight was
        launched over the lane to where it landed.
        """
        save_trace(self, path)

    def draw(self, steps: slice | None = None) -> "Figure":
        """A matplotlib figure of what all ranks did while rank 0 was in some steps; needs matplotlib.

        Args:
            steps: as in `window`; None: the latest six.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError, TypeError: as in `window`.
        """
        from .drawing import draw

        return draw(self, steps)

    def __repr__(self) -> str:
        steps = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no step"
        return f"<Timeline: {self.ranks} ranks, {steps}, {len(self.flights)} flights, clocks within {self.error:.2g} s>"


def covered(intervals: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """The length of a union of intervals within a window."""
    total, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        if end > start:
            total, reached = total + end - start, end
    return total
