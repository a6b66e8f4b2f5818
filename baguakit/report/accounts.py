"""The account of each rank of its latest steps, on its own clock; and the timeline of all ranks on one clock.

The clocks of two ranks are compared by collectives that no rank leaves before all have entered. If rank 0 enters and
leaves at a and b on its clock, and rank r at c and d on its own, then the lead θ of r's clock lies in

    c − b  ≤  θ  ≤  d − a

and in the intersection of these intervals over several collectives. The middle of that is taken for θ, and half of its
length is the error.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..comm import Comm
from ..flights import STEP, BucketFlight, Logbook, RuleRunner, StepRecord
from ..lanes import Moment, reader
from .drawing import BESIDE, TRAINING, FlightSpan, Span
from .timeline import Timeline

PINGS = 16  # collectives that compare the clocks

Ping = tuple[float, float]  # the times when a rank entered and left a collective
Account = tuple[list[Span], list[Ping]]


def account(rank: int, runners: Sequence[RuleRunner], log: Logbook, steps: int | None) -> list[Span]:
    """Return the spans of this rank in its latest `steps` (None: all recorded). Waits for the device."""
    records = list(log.steps)[-steps if steps else None :]
    if not records:
        return []
    read = reader(log.device)
    begin, end = read(records[0].begin), read(records[-1].end)
    spans = [span for record in records for span in training_spans(rank, record, read)]
    for runner in runners:
        in_air = runner.flights()
        for flights in runner.records:
            for flight in list(flights):
                if flight not in in_air and flight.flight.times().waits:
                    phases, waits = flight_spans(rank, flight, read)
                    if phases and phases[0].launched < end and phases[0].landed > begin:
                        spans += [*phases, *(wait for wait in waits if wait.start >= begin)]
    return spans


def training_spans(rank: int, record: StepRecord, read: Callable[[Moment], float]) -> list[Span]:
    """Return the span of a step, and those of its parts."""
    parts = [(STEP, record.begin, record.end), *record.parts]
    return [Span(rank, TRAINING, name, read(begin), read(end), record.step) for name, begin, end in parts]


def flight_spans(
    rank: int, flight: BucketFlight, read: Callable[[Moment], float]
) -> tuple[list[FlightSpan], list[Span]]:
    """Return the span of each phase of a flight, and those of the waits for it."""
    times, runner = flight.flight.times(), flight.runner
    name, which = runner.name(flight.bucket), (runner.label, flight.bucket, flight.round)
    waits = []
    for since, until in times.waits:
        start = read(since)
        waits.append(Span(rank, TRAINING, f"wait for {name}", start, max(start, read(until)), flight.step, *which))
    about = flight.step, *which, read(times.launched), waits[-1].end
    lane = f"lane {runner.channel.number}"
    phases = zip(itertools.cycle((lane, f"{lane} {BESIDE}")), times.phases, strict=False)
    return [FlightSpan(rank, on, name, read(start), read(end), *about) for on, (start, end) in phases], waits


def gathered(comm: Comm, device: torch.device, spans: list[Span]) -> Timeline:
    """Return the timeline of all ranks from the account of each. Collective."""
    one = torch.zeros(1, dtype=torch.float32, device=device)
    mine: list[Ping] = []
    for _ in range(PINGS):
        entered = time.perf_counter()
        float(comm.all_reduce(one))
        mine.append((entered, time.perf_counter()))
    accounts: list[Account] = comm.gather_objects((spans, mine))
    reference = accounts[0][1]
    compared = [(0.0, 0.0), *(ahead(reference, pings) for _, pings in accounts[1:])]
    moved = [
        shifted(span, -theta) for (theta, _), (theirs, _) in zip(compared, accounts, strict=True) for span in theirs
    ]
    first = min((s.launched if isinstance(s, FlightSpan) else s.start for s in moved), default=0.0)
    ordered = sorted((shifted(s, -first) for s in moved), key=lambda s: (s.rank, s.thread, s.start, -s.end))
    errors = sorted(error for _, error in compared)
    return Timeline(comm.size, tuple(ordered), sum(errors[-2:]))


def ahead(reference: Sequence[Ping], pings: Sequence[Ping]) -> tuple[float, float]:
    """Return the lead of one clock over another in seconds, and the error of that."""
    least = max(c - b for (_, b), (c, _) in zip(reference, pings, strict=True))
    most = min(d - a for (a, _), (_, d) in zip(reference, pings, strict=True))
    return (least + most) / 2, abs(most - least) / 2


def shifted(span: Span, by: float) -> Span:
    """Return the span moved by `by` seconds."""
    start, end = span.start + by, span.end + by
    if isinstance(span, FlightSpan):
        return replace(span, start=start, end=end, launched=span.launched + by, landed=span.landed + by)
    return replace(span, start=start, end=end)
