"""What an attachment has sent, and how long training stood still for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..comm import Comm
from .routes import Route, Track, Trip


@dataclass(frozen=True, eq=False)
class Row:
    """One bucket of one rule.

    Attributes:
        rule, bucket: which.
        values, dtype: how many values it holds, padding included, and of what dtype.
        flights: how many times it has been launched.
        bytes: what this rank has sent in all of them, by part of the network ("flat", "intra", "inter").
    """

    rule: str
    bucket: int
    values: int
    dtype: str
    flights: int
    bytes: dict[str, float]
    _trips: tuple[Trip, ...] = field(repr=False)

    @cached_property
    def seconds(self) -> float:
        """Seconds in the air, the mean over the latest flights; waits for them on CUDA."""
        return sum(trip.flight.seconds()[0] for trip in self._trips) / max(1, len(self._trips))

    @cached_property
    def exposed(self) -> float:
        """Seconds for which training stood still for a flight, likewise."""
        return sum(trip.flight.seconds()[1] for trip in self._trips) / max(1, len(self._trips))


@dataclass(frozen=True, eq=False)
class Report:
    """What an attachment has done so far: `rows`, one for each bucket of each rule. Print it."""

    steps: int
    ranks: int
    groups: int
    rows: tuple[Row, ...]

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent, all in all."""
        return sum(sum(row.bytes.values()) for row in self.rows)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this rank has sent for each optimizer step."""
        return self.bytes_sent / max(1, self.steps)

    def __str__(self) -> str:
        lines = [
            f"{self.steps} steps, {self.ranks} ranks, {self.groups} groups; {_size(self.bytes_per_step)} sent a step"
        ]
        lines.append(
            f"{'bucket':>8} {'values':>12} {'dtype':>9} {'flights':>8} "
            f"{'sent/flight':>12} {'in the air':>11} {'exposed':>11}"
        )
        rule = None
        for row in self.rows:
            if row.rule != rule:
                lines.append(row.rule)
                rule = row.rule
            sent = _size(sum(row.bytes.values()) / max(1, row.flights))
            lines.append(
                f"{row.bucket:>8} {row.values:>12,} {row.dtype:>9} {row.flights:>8} "
                f"{sent:>12} {row.seconds * 1e3:>8.2f} ms {row.exposed * 1e3:>8.2f} ms"
            )
        return "\n".join(lines)

    __repr__ = __str__


def make_report(routes: Sequence[Route], tracks: Sequence[Track], host: Any, steps: int) -> Report:
    """The report of an attachment at this moment; nothing is waited for."""
    rows = []
    for route in routes:
        for i, bucket in enumerate(route.buckets):
            dtype = str(bucket.flat.dtype).removeprefix("torch.")
            flown = tuple(trip for trip in route.records[i] if trip is not route.air.get(i))
            sent = dict(route.sent[i])
            rows.append(Row(repr(route.rule), i, bucket.flat.numel(), dtype, route.launches[i], sent, flown))
    comms: list[Comm] = [track.comm for track in tracks] + ([host] if host else [])
    size = tracks[0].comm.size
    return Report(steps, size, sum(len(c.groups()) for c in comms) if size > 1 else 0, tuple(rows))


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
