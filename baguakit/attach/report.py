"""What an attachment has sent, and how long training stood still for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..comm import Comm
from .routes import Route, Track, Trip


@dataclass(frozen=True)
class Row:
    """One bucket of one rule.

    Attributes:
        rule, bucket: which.
        values, dtype: how many values it holds, padding included, and of what dtype.
        flights: how many times it has been launched.
        bytes: what this rank has sent in all of them, by part of the network ("flat", "intra", "inter").
        seconds: in the air, the mean over the latest flights.
        exposed: seconds for which training stood still, likewise.
    """

    rule: str
    bucket: int
    values: int
    dtype: str
    flights: int
    bytes: dict[str, float]
    seconds: float
    exposed: float


@dataclass(frozen=True, eq=False)
class Report:
    """What an attachment has done so far. Reading `rows` waits, on CUDA, for the flights that it tells of."""

    step: int
    ranks: int
    groups: int
    _counts: tuple[tuple[Any, ...], ...]  # the fields of a Row but the last two, and the trips that those tell of

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """A row for each bucket of each rule."""
        return tuple(Row(*each[:-1], *_seconds(each[-1])) for each in self._counts)

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent, all in all."""
        return sum(sum(counts[5].values()) for counts in self._counts)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this rank has sent for each optimizer step."""
        return self.bytes_sent / max(1, self.step)

    def __str__(self) -> str:
        lines = [
            f"{self.step} steps, {self.ranks} ranks, {self.groups} groups; {_size(self.bytes_per_step)} sent a step"
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


def make_report(routes: Sequence[Route], tracks: Sequence[Track], host: Any, step: int) -> Report:
    """The report of an attachment at this moment; nothing is waited for."""
    counts = []
    for route in routes:
        for i, bucket in enumerate(route.buckets):
            dtype = str(bucket.flat.dtype).removeprefix("torch.")
            flown = tuple(trip for trip in route.records[i] if trip is not route.air.get(i))
            flights = route.launches[i]
            counts.append((repr(route.rule), i, bucket.flat.numel(), dtype, flights, dict(route.sent[i]), flown))
    comms: list[Comm] = [track.comm for track in tracks] + ([host] if host else [])
    size = tracks[0].comm.size
    return Report(step, size, sum(len(c.groups()) for c in comms) if size > 1 else 0, tuple(counts))


def _seconds(trips: Sequence[Trip]) -> tuple[float, float]:
    both = [trip.flight.seconds() for trip in trips]
    n = max(1, len(both))
    return sum(flown for flown, _ in both) / n, sum(exposed for _, exposed in both) / n


def _size(nbytes: float) -> str:
    for unit in ("B", "KB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
