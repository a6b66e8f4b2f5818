"""A timeline of all ranks: training, flights on lanes, and the waits for flights.

Each rank records its latest steps with its own clock. The clocks of two ranks are compared by collectives that no rank
leaves before all have entered. If rank 0 enters and leaves at a and b on its clock, and rank r at c and d on its own
clock, then the lead θ of rank r's clock over rank 0's clock lies in

    c − b  ≤  θ  ≤  d − a

and in the intersection of these intervals over several collectives. The middle of the intersection is taken as θ, and
half of its length as the error.

A timeline is saved in the format of Chrome's tracing, which Perfetto can open, too: JSON with times in microseconds.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import torch

from ..arguments import checked
from ..comm import Comm
from ..flights import STEP, BucketFlight, Logbook, RuleRunner
from ..lanes import Moment, reader

PINGS = 16  # collectives that compare the clocks
TRAINING = "training"
BESIDE = "beside"  # the lane beside a lane is named after it, with this word at the end

Ping = tuple[float, float]  # the times when a rank entered and left a collective
Event = dict[str, Any]


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


@dataclass(frozen=True, repr=False)
class Timeline:
    """A timeline of all ranks. `Attachment.timeline` makes it.

    Attributes:
        ranks: the number of ranks.
        spans: in the order of ranks and times. Two spans on one thread of a rank are nested or do not overlap.
        error: the largest possible difference between the clocks of two ranks in this timeline, in seconds.
    """

    ranks: int
    spans: tuple[Span, ...]
    error: float

    @property
    def flights(self) -> tuple[Span, ...]:
        """Return the spans of flights."""
        return tuple(span for span in self.spans if span.flies)

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the numbers of the steps that rank 0 recorded."""
        return tuple(s.step for s in self.spans if s.rank == 0 and s.name == STEP and s.step is not None)

    def overlap(self) -> float:
        """Return the share of the time of flights, from launch to landing, in which training did not wait.

        It is the share over all ranks: 1 if nothing was exposed, NaN if there was no flight.
        """
        ranks = [[s for s in self.spans if s.rank == rank] for rank in range(self.ranks)]
        away = sum(_covered(s for s in spans if s.flies) for spans in ranks)
        waiting = sum(_covered(s for s in spans if s.waits) for spans in ranks)
        return 1 - waiting / away if away else nan

    @checked
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for https://ui.perfetto.dev and chrome://tracing. One rank is enough: all have the same data.

        In the trace each rank is a process, with a thread for training and one for each lane. An arrow goes from the
        launch of a flight, through its work on the lane, to its landing.
        """
        events = [event for rank in range(self.ranks) for event in _named(rank, "process", 0, f"rank {rank}")]
        for rank, thread in sorted({(s.rank, s.thread) for s in self.spans}):
            events += _named(rank, "thread", _tid(thread), thread)
        events += [_slice_of(span) for span in self.spans]
        events += [event for number, flight in enumerate(self.flights) for event in _arrow(number, flight)]
        about = {"what": "baguakit timeline", "clocks agree within (s)": self.error}
        trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
        Path(path).write_text(json.dumps(trace, allow_nan=False), encoding="utf-8")

    def __repr__(self) -> str:
        steps = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no step"
        return f"<Timeline: {self.ranks} ranks, {steps}, {len(self.flights)} flights, clocks within {self.error:.2g} s>"


def _covered(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one of the spans was between its launch and its landing."""
    total, reached = 0.0, -inf
    for start, end in sorted((s.launched, s.landed) for s in spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _tid(thread: str) -> int:
    """Return the number of a thread: 0 for training, 1 for lane 0, 2 for lane 1, 3 for the lane beside lane 0."""
    return 1 + int(thread.split()[1]) + 2 * thread.endswith(BESIDE) if thread != TRAINING else 0


def _named(pid: int, kind: str, tid: int, name: str) -> list[Event]:
    """Return the events that name a process or a thread, and set its position."""
    about = {"name": name, "sort_index": pid if kind == "process" else tid}
    return [{"ph": "M", "pid": pid, "tid": tid, "name": f"{kind}_{k}", "args": {k: v}} for k, v in about.items()]


def _slice_of(span: Span) -> Event:
    about = {"step": span.step, "rule": span.rule, "bucket": span.bucket, "round": span.round}
    start, end = round(1e6 * span.start, 3), round(1e6 * span.end, 3)
    where = {"ph": "X", "pid": span.rank, "tid": _tid(span.thread), "ts": start, "dur": round(end - start, 3)}
    name = f"step {span.step}" if span.name == STEP else span.name
    kind = "wait" if span.waits else span.thread.split()[0]
    return {**where, "name": name, "cat": kind, "args": {k: v for k, v in about.items() if v is not None}}


def _arrow(number: int, flight: Span) -> list[Event]:
    """Return the events of an arrow from the launch of a flight, through its work on the lane, to its landing."""
    same = {"name": flight.name, "cat": "flight", "id": number, "pid": flight.rank}
    # An arrow ends at the slice that contains its end time. At `landed` the wait is over; the arrow ends 1 ns before.
    times = (flight.launched, flight.start, flight.end, flight.landed)
    launched, start, end, landed = (round(1e6 * at, 3) for at in times)
    return [
        {**same, "ph": "s", "tid": 0, "ts": launched},
        {**same, "ph": "t", "tid": _tid(flight.thread), "ts": start},
        {**same, "ph": "f", "bp": "e", "tid": 0, "ts": max(end, round(landed - 0.001, 3))},
    ]


def account(rank: int, runners: Sequence[RuleRunner], log: Logbook, steps: int | None) -> list[Span]:
    """Return the spans of this rank in its latest `steps` steps (None: all recorded). Waits for the device."""
    records = list(log.steps)[-steps if steps else None :]
    if not records:
        return []
    read = reader(log.device)
    begin, end = read(records[0].begin), read(records[-1].end)
    spans = [
        Span(rank, TRAINING, name, read(since), read(until), record.step)
        for record in records
        for name, since, until in ((STEP, record.begin, record.end), *record.parts)
    ]
    for runner in runners:
        in_air = runner.flights()
        for flight in [each for ledger in runner.ledgers for each in ledger.flights]:
            if isinstance(flight, BucketFlight) and flight not in in_air and flight.flight.waits:
                phases, waits = _flight_spans(rank, flight, read)
                if phases and phases[0].launched < end and phases[0].landed > begin:
                    spans += [*phases, *(wait for wait in waits if wait.start >= begin)]
    return spans


def _flight_spans(rank: int, flight: BucketFlight, read: Callable[[Moment], float]) -> tuple[list[Span], list[Span]]:
    times, runner = flight.flight, flight.runner
    name, which = runner.ledgers[flight.bucket].name, (flight.step, runner.label, flight.bucket, flight.round)
    waits = []
    for since, until in times.waits:
        start = read(since)
        waits.append(Span(rank, TRAINING, f"wait for {name}", start, max(start, read(until)), *which))
    away, lane = (read(times.launched), waits[-1].end), f"lane {runner.channel.number}"
    phases = zip(itertools.cycle((lane, f"{lane} {BESIDE}")), times.phases, strict=False)
    return [Span(rank, on, name, read(start), read(end), *which, *away) for on, (start, end) in phases], waits


def gathered(device: torch.device, spans: list[Span], comm: Comm) -> Timeline:
    """Return the timeline of all ranks from the `spans` of each rank. Collective."""
    one = torch.zeros(1, dtype=torch.float32, device=device)
    mine: list[Ping] = []
    for _ in range(PINGS):
        entered = time.perf_counter()
        float(comm.all_reduce(one))
        mine.append((entered, time.perf_counter()))
    accounts: list[tuple[list[Span], list[Ping]]] = comm.gather_objects((spans, mine))
    compared = [(0.0, 0.0), *(ahead(accounts[0][1], pings) for _, pings in accounts[1:])]
    moved = [shifted(s, -theta) for (theta, _), (theirs, _) in zip(compared, accounts, strict=True) for s in theirs]
    first = min((span.launched for span in moved), default=0.0)
    ordered = sorted((shifted(s, -first) for s in moved), key=lambda s: (s.rank, s.thread, s.start, -s.end))
    return Timeline(comm.size, tuple(ordered), sum(sorted(error for _, error in compared)[-2:]))


def ahead(reference: Sequence[Ping], pings: Sequence[Ping]) -> tuple[float, float]:
    """Return the lead of the clock of `pings` over the clock of `reference`, and the lead's error, in seconds."""
    least = max(c - b for (_, b), (c, _) in zip(reference, pings, strict=True))
    most = min(d - a for (a, _), (_, d) in zip(reference, pings, strict=True))
    return (least + most) / 2, abs(most - least) / 2


def shifted(span: Span, by: float) -> Span:
    return replace(span, **{name: getattr(span, name) + by for name in ("start", "end", "launched", "landed")})
