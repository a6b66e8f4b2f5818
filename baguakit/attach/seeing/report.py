"""The report of an attachment: the bytes it has sent, and how long training stood still for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from ...comm import Comm
from ..routes import Route, Track, Trip

HEAD = ("", "values", "dtype", "flights", "sent each", "on the lane", "exposed")


@dataclass(frozen=True, eq=False)
class Row:
    """One bucket of one rule.

    Attributes:
        rule, number, bucket: which: the rule in words and by its number in `att.rules`, and the number of the bucket.
        values, dtype: how many values it holds, padding included, and of what dtype.
        flights, landed: how many times it has been launched, and has landed.
        bytes: what this rank has sent in all of them, by part of the network ("flat", "intra", "inter").
    """

    rule: str
    number: int
    bucket: int
    values: int
    dtype: str
    flights: int
    landed: int
    bytes: dict[str, float]
    _trips: tuple[Trip, ...] = field(repr=False)

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent in all flights, over all parts of the network."""
        return sum(self.bytes.values())

    @cached_property
    def _seconds(self) -> tuple[float, float]:
        known = [trip.flight.seconds() for trip in self._trips if trip.flight.over()]
        air, exposed = (sum(each) / max(1, len(known)) for each in zip(*known, strict=True)) if known else (0.0, 0.0)
        return air, exposed

    @property
    def seconds(self) -> float:
        """Seconds of work on the lane, the mean over those of the latest flights that the device is done with."""
        return self._seconds[0]

    @property
    def exposed(self) -> float:
        """Seconds for which training stood still for a flight, likewise."""
        return self._seconds[1]


@dataclass(frozen=True, eq=False)
class Report:
    """A report of an attachment so far. Print it.

    Attributes:
        steps: optimizer steps since the buckets were cut.
        ranks, groups: how many ranks there are, and how many process groups the attachment has made.
        rows: one for each bucket of each rule.
        seconds_per_step: of the latest steps, the mean; None with one rank, or before the first step.
    """

    steps: int
    ranks: int
    groups: int
    rows: tuple[Row, ...]
    seconds_per_step: float | None = None

    @property
    def bytes_sent(self) -> float:
        """Bytes that this rank has sent, all in all."""
        return sum(row.bytes_sent for row in self.rows)

    @property
    def bytes_per_step(self) -> float:
        """Bytes that this rank has sent for each optimizer step."""
        return self.bytes_sent / max(1, self.steps)

    @property
    def exposed_per_step(self) -> float:
        """Seconds for which training stood still in each optimizer step:  Σ_rows exposed · landed / steps."""
        return self._per_step(row.exposed * row.landed for row in self.rows)

    @property
    def exposed_share(self) -> float | None:
        """`exposed_per_step` in parts of a step; None where the length of a step is not known."""
        return self.exposed_per_step / self.seconds_per_step if self.seconds_per_step else None

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the network in which anything was sent: "flat", or "intra" and "inter"."""
        return tuple(sorted({part for row in self.rows for part in row.bytes}))

    def scalars(self) -> dict[str, float]:
        """The figures by names for a logger, such as TensorBoard's, wandb's or Lightning's `log_dict`.

        `baguakit/…` of `bytes_per_step`, `exposed_seconds_per_step`, `air_seconds_per_step`, and `exposed_share` once
        it is known; of `bytes_per_step_intra` and `_inter` where both are used; and of the first three for each of
        several rules, as `baguakit/rule_0/…`, by their order in `att.rules`.
        """
        named = self._figures("baguakit", self.rows)
        if self.exposed_share is not None:
            named["baguakit/exposed_share"] = self.exposed_share
        if len(self.parts) > 1:
            for part in self.parts:
                sent = self._per_step(row.bytes.get(part, 0) for row in self.rows)
                named[f"baguakit/bytes_per_step_{part}"] = sent
        rules = [(number, list(rows)) for number, rows in groupby(self.rows, key=lambda row: row.number)]
        if len(rules) > 1:
            for number, rows in rules:
                named |= self._figures(f"baguakit/rule_{number}", rows)
        return named

    def _figures(self, prefix: str, rows: Sequence[Row]) -> dict[str, float]:
        return {
            f"{prefix}/bytes_per_step": self._per_step(row.bytes_sent for row in rows),
            f"{prefix}/exposed_seconds_per_step": self._per_step(row.exposed * row.landed for row in rows),
            f"{prefix}/air_seconds_per_step": self._per_step(row.seconds * row.landed for row in rows),
        }

    def _per_step(self, amounts: Iterable[float]) -> float:
        return sum(amounts) / max(1, self.steps)

    def __str__(self) -> str:
        return "\n".join([self._summary(), *table(self)])

    __repr__ = __str__

    def _summary(self) -> str:
        length = f" of {milliseconds(self.seconds_per_step)}" if self.seconds_per_step else ""
        share = f" ({self.exposed_share:.1%})" if self.exposed_share is not None else ""
        return (
            f"{counted(self.steps, 'step')}{length} on {counted(self.ranks, 'rank')}, "
            f"{counted(self.groups, 'group')}; {size(self.bytes_per_step)} sent a step, "
            f"{milliseconds(self.exposed_per_step)} exposed{share}"
        )


def table(report: Report) -> list[str]:
    """A line for each bucket, under the rule in words; what is sent and how long it takes is of one flight.

    A rule of several buckets has a line for all of them: they fly equally often.
    """
    parts = report.parts if len(report.parts) > 1 else ()
    lines: list[str | tuple[str, ...]] = [("", *HEAD[1:5], *parts, *HEAD[5:])]
    for _, group in groupby(report.rows, key=lambda row: row.number):
        rows = list(group)
        lines.append(rows[0].rule)
        lines += [cells(f"bucket {row.bucket}", [row], parts) for row in rows]
        lines += [cells("all", rows, parts)] * (len(rows) > 1)
    columns = zip(*(line for line in lines if isinstance(line, tuple)), strict=True)
    widths = [max(map(len, column)) for column in columns]
    return [line if isinstance(line, str) else aligned(line, widths) for line in lines]


def cells(name: str, rows: Sequence[Row], parts: Iterable[str]) -> tuple[str, ...]:
    """One line: of a bucket, or of several that fly together."""

    def sent(part: str | None) -> str:
        each = (row.bytes_sent if part is None else row.bytes.get(part, 0) for row in rows)
        return size(sum(nbytes / max(1, row.flights) for nbytes, row in zip(each, rows, strict=True)))

    return (
        name,
        f"{sum(row.values for row in rows):,}",
        "/".join(dict.fromkeys(row.dtype for row in rows)),
        f"{max(row.flights for row in rows):,}",
        sent(None),
        *(sent(part) for part in parts),
        milliseconds(sum(row.seconds for row in rows)),
        milliseconds(sum(row.exposed for row in rows)),
    )


def aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    """Cells in columns, flush right."""
    return "   ".join(cell.rjust(width) for cell, width in zip(line, (widths[0] + 2, *widths[1:]), strict=True))


def make_report(
    routes: Sequence[Route], tracks: Sequence[Track], host: Any, steps: int, seconds_per_step: float | None = None
) -> Report:
    """The report of an attachment at this moment; nothing is waited for."""
    rows = []
    for route in routes:
        for i, bucket in enumerate(route.buckets):
            dtype = str(bucket.flat.dtype).removeprefix("torch.")
            flown = tuple(trip for trip in route.records[i] if trip is not route.air.get(i))
            which = (route.label, route.index, i, bucket.flat.numel(), dtype)
            landed = route.launches[i] - (len(route.records[i]) - len(flown))
            rows.append(Row(*which, route.launches[i], landed, dict(route.sent[i]), flown))
    comms: list[Comm] = [track.comm for track in tracks] + ([host] if host else [])
    ranks = tracks[0].comm.size
    groups = sum(len(c.groups()) for c in comms) if ranks > 1 else 0
    return Report(steps, ranks, groups, tuple(rows), seconds_per_step)


def counted(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def milliseconds(seconds: float) -> str:
    """Seconds, as a reader of tables wants them."""
    return f"{1e3 * seconds:,.2f} ms"


def size(nbytes: float) -> str:
    """Bytes, with three or four digits."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
