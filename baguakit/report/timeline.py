"""A timeline of all ranks: training, the flights on its lanes, and the waits for them.

A timeline is saved in the format of Chrome's tracing, which Perfetto opens as well: JSON, with times in microseconds.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import checked
from ..flights import STEP
from .drawing import BESIDE, TRAINING, FlightSpan, Span, covered, draw, flights_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Event = dict[str, Any]


def save_trace(path: str | os.PathLike[str], ranks: int, spans: Sequence[Span], error: float) -> None:
    """Write a trace: ranks are processes; training is their thread 0, and lanes are the threads from 1 on."""
    events = [event for rank in range(ranks) for event in named(rank, "process", 0, f"rank {rank}")]
    for rank, thread in sorted({(s.rank, s.thread) for s in spans}):
        events += named(rank, "thread", tid(thread), thread)
    events += [slice_of(span) for span in spans]
    for number, flight in enumerate(flights_of(spans)):
        events += arrow(number, flight)
    about = {"what": "baguakit timeline", "clocks agree within (s)": error}
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    Path(path).write_text(json.dumps(trace, allow_nan=False), encoding="utf-8")


def tid(thread: str) -> int:
    """Return the number of a thread: 0 for training, 1 for lane 0, 2 for lane 1; 3 for the one beside lane 0."""
    return 1 + int(thread.split()[1]) + 2 * thread.endswith(BESIDE) if thread.startswith("lane") else 0


def named(pid: int, kind: str, tid: int, name: str) -> list[Event]:
    """Return the events that name a process or a thread, and place it."""
    at = {"ph": "M", "pid": pid, "tid": tid}
    about = {"name": {"name": name}, "sort_index": {"sort_index": pid if kind == "process" else tid}}
    return [{**at, "name": f"{kind}_{what}", "args": args} for what, args in about.items()]


def slice_of(span: Span) -> Event:
    """Return the event of a span."""
    about = {"step": span.step, "rule": span.rule, "bucket": span.bucket, "round": span.round}
    start, end = microseconds(span.start), microseconds(span.end)
    return {
        "ph": "X",
        "pid": span.rank,
        "tid": tid(span.thread),
        "name": f"step {span.step}" if span.name == "step" else span.name,
        "cat": "wait" if span.waits else span.thread.split()[0],
        "ts": start,
        "dur": round(end - start, 3),
        "args": {key: value for key, value in about.items() if value is not None},
    }


def arrow(number: int, flight: FlightSpan) -> list[Event]:
    """Return the events of an arrow from the launch of a flight over its work on the lane to its landing."""
    same = {"name": flight.name, "cat": "flight", "id": number, "pid": flight.rank}
    # An arrow ends at the slice that holds its time, and the wait that the flight ends is over when it has landed.
    landed = max(microseconds(flight.end), round(microseconds(flight.landed) - 0.001, 3))
    return [
        {**same, "ph": "s", "tid": 0, "ts": microseconds(flight.launched)},
        {**same, "ph": "t", "tid": tid(flight.thread), "ts": microseconds(flight.start)},
        {**same, "ph": "f", "bp": "e", "tid": 0, "ts": landed},
    ]


def microseconds(seconds: float) -> float:
    """Return microseconds, rounded to nanoseconds."""
    return round(seconds * 1e6, 3)


LATEST = 6  # steps drawn if none are asked for


@dataclass(frozen=True, repr=False)
class Timeline:
    """A timeline of all ranks; made by `Attachment.timeline`.

    Attributes:
        ranks: the number of ranks.
        spans: in the order of ranks and times. On one thread of one rank they nest or lie apart.
        error: seconds by which the clocks of two ranks may differ here; their offsets were measured.
    """

    ranks: int
    spans: tuple[Span, ...]
    error: float

    @property
    def flights(self) -> tuple[FlightSpan, ...]:
        """Return the flights among the spans."""
        return flights_of(self.spans)

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps of rank 0, by number."""
        return tuple(step for step, _, _ in self._steps())

    def _steps(self) -> list[tuple[int, float, float]]:
        ours = (s for s in self.spans if s.rank == 0 and s.thread == TRAINING)
        return [(s.step, s.start, s.end) for s in ours if s.name == STEP and s.step is not None]

    def window(self, steps: slice | None = None) -> tuple[float, float]:
        """Return the times when rank 0 began and ended some steps.

        Args:
            steps: a slice of their numbers, counted from the end where negative; None: all.

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
        """Return the share of the time of flights, from launch to landing, in which training did not wait.

        Over all ranks, and over the time in which rank 0 made these steps. 1: nothing was exposed; NaN: nothing flew.
        """
        window = self.window(steps)
        away = waiting = 0.0
        for rank in range(self.ranks):
            away += covered(((s.launched, s.landed) for s in self.flights if s.rank == rank), window)
            waiting += covered(((s.start, s.end) for s in self.spans if s.rank == rank and s.waits), window)
        return 1 - waiting / away if away else float("nan")

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for https://ui.perfetto.dev and chrome://tracing. All ranks have the same: one may save.

        Each rank is a process with a thread for training and one for each lane. An arrow goes from the launch of a
        flight over its lane to its landing.
        """
        save_trace(path, self.ranks, self.spans, self.error)

    def draw(self, steps: slice | None = None) -> "Figure":
        """Return a matplotlib figure of all ranks, over the time in which rank 0 made some steps; needs matplotlib.

        Args:
            steps: as in `window`; None: the latest six.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError, TypeError: as in `window`.
        """
        steps = slice(-LATEST, None) if steps is None else steps
        return draw(self.ranks, self.spans, self.window(steps), self.overlap(steps))

    def __repr__(self) -> str:
        steps = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no step"
        return f"<Timeline: {self.ranks} ranks, {steps}, {len(self.flights)} flights, clocks within {self.error:.2g} s>"
