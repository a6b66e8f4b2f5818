"""Each rank's account of its latest steps, on its own clock; and all of them put together on one.

The clocks of two ranks are compared by collectives that all leave only after all have entered. If rank 0 entered and
left at a and b on its clock, and rank r at c and d on its own, then what r's clock is ahead lies in

    c − b  ≤  θ  ≤  d − a

and in the intersection of these intervals over several collectives. Its middle is taken for θ, and half of its length
is the error.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ...comm import Comm
from ...lanes import Moment, reader
from ..routes import Route, Trip
from .logbook import STEP, Logbook, StepRecord
from .timeline import TRAINING, FlightSpan, Span, Timeline

PINGS = 16  # collectives by which clocks are compared

Ping = tuple[float, float]  # when a rank entered a collective, and when it left
Account = tuple[list[Span], list[Ping]]


def account(rank: int, routes: Sequence[Route], log: Logbook, steps: int | None) -> list[Span]:
    """Return the spans of this rank in its latest `steps` (None: all recorded). Waits for the device."""
    records = list(log.steps)[-steps if steps else None :]
    if not records:
        return []
    read = reader(log.device)
    begin, end = read(records[0].begin), read(records[-1].end)
    spans = [span for record in records for span in training_spans(rank, record, read)]
    for route in routes:
        for i, trips in enumerate(route.records):
            for trip in list(trips):
                if trip is not route.air.get(i) and trip.flight.passage().waits:
                    flight, waits = flight_spans(rank, trip, read)
                    if flight.launched < end and flight.landed > begin:
                        spans += [flight, *(wait for wait in waits if wait.start >= begin)]
    return spans


def training_spans(rank: int, record: StepRecord, read: Callable[[Moment], float]) -> list[Span]:
    """A step, and what training did in it."""
    parts = [(STEP, record.begin, record.end), *((part.name, part.begin, part.end) for part in record.parts)]
    return [Span(rank, TRAINING, name, read(begin), read(end), record.step) for name, begin, end in parts]


def flight_spans(rank: int, trip: Trip, read: Callable[[Moment], float]) -> tuple[FlightSpan, list[Span]]:
    """A flight, and the waits for it."""
    passage, route = trip.flight.passage(), trip.route
    name, which = route.name(trip.bucket), (route.label, trip.bucket, trip.round)
    waits = []
    for since, until in passage.waits:
        start = read(since)
        waits.append(Span(rank, TRAINING, f"wait for {name}", start, max(start, read(until)), trip.step, *which))
    start, end, launched = read(passage.begun), read(passage.arrived), read(passage.launched)
    lane, landed = f"lane {route.track.number}", waits[-1].end
    return FlightSpan(rank, lane, name, start, end, trip.step, *which, launched, landed), waits


def gathered(comm: Comm, device: torch.device, spans: list[Span]) -> Timeline:
    """The timeline of all ranks from the account of each. Collective."""
    one = torch.zeros(1, device=device)
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
    """How many seconds one clock is ahead of another, and by how many this may be wrong."""
    least = max(c - b for (_, b), (c, _) in zip(reference, pings, strict=True))
    most = min(d - a for (a, _), (_, d) in zip(reference, pings, strict=True))
    return (least + most) / 2, abs(most - least) / 2


def shifted(span: Span, by: float) -> Span:
    """The same, `by` seconds later."""
    start, end = span.start + by, span.end + by
    if isinstance(span, FlightSpan):
        return replace(span, start=start, end=end, launched=span.launched + by, landed=span.landed + by)
    return replace(span, start=start, end=end)
