"""Traces in the format of Chrome's tracing, which Perfetto opens as well: JSON, with times in microseconds."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .spans import BESIDE, FlightSpan, Span, flights_of

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
