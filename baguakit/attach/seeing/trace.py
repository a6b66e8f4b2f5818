"""A timeline in the format of Chrome's tracing, which Perfetto opens as well: JSON, with times in microseconds."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .timeline import FlightSpan, Span, Timeline

Event = dict[str, Any]


def save_trace(timeline: "Timeline", path: str | os.PathLike[str]) -> None:
    """Write `trace_of(timeline)`."""
    Path(path).write_text(json.dumps(trace_of(timeline), allow_nan=False), encoding="utf-8")


def trace_of(timeline: "Timeline") -> dict[str, Any]:
    """The trace: ranks are processes; training is their thread 0, and lanes are the threads from 1 on."""
    threads = {(s.rank, s.thread): s.thread for s in timeline.spans}
    events = [event for rank in range(timeline.ranks) for event in named(rank, "process", 0, f"rank {rank}")]
    for rank, thread in sorted(threads):
        events += named(rank, "thread", tid(thread), thread)
    events += [slice_of(span) for span in timeline.spans]
    for number, flight in enumerate(timeline.flights):
        events += arrow(number, flight)
    about = {"what": "baguakit timeline", "clocks agree within (s)": timeline.error}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def tid(thread: str) -> int:
    """The number of a thread: 0 for training, 1 for lane 0."""
    return int(thread.split()[-1]) + 1 if thread.startswith("lane") else 0


def named(pid: int, kind: str, tid: int, name: str) -> list[Event]:
    """A process or a thread has this name, and stands at its place."""
    at = {"ph": "M", "pid": pid, "tid": tid}
    place = pid if kind == "process" else tid
    return [
        {**at, "name": f"{kind}_name", "args": {"name": name}},
        {**at, "name": f"{kind}_sort_index", "args": {"sort_index": place}},
    ]


def slice_of(span: "Span") -> Event:
    """A span as a slice."""
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


def arrow(number: int, flight: "FlightSpan") -> list[Event]:
    """From the launch of a flight over its work on the lane to its landing."""
    same = {"name": flight.name, "cat": "flight", "id": number, "pid": flight.rank}
    # An arrow ends at the slice that holds its time, and the wait that the flight ends is over when it has landed.
    landed = max(microseconds(flight.end), round(microseconds(flight.landed) - 0.001, 3))
    return [
        {**same, "ph": "s", "tid": 0, "ts": microseconds(flight.launched)},
        {**same, "ph": "t", "tid": tid(flight.thread), "ts": microseconds(flight.start)},
        {**same, "ph": "f", "bp": "e", "tid": 0, "ts": landed},
    ]


def microseconds(seconds: float) -> float:
    """Microseconds to three digits: nanoseconds."""
    return round(seconds * 1e6, 3)
