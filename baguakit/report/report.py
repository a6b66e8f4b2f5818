"""The report of an attachment: the bytes sent and the seconds of exposed communication. It prints as a table."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any

from ..arguments import describe
from ..comm import SentFormat
from ..flights import Ledger, Life
from ..monitor import Collective


@dataclass(frozen=True, eq=False)
class Row:
    """The report of one bucket of one rule.

    Attributes:
        rule, number, bucket: the rule as text, its number in `att.rules`, and the number of the bucket.
        values, dtype: the number of values of the bucket, including padding, and their dtype.
        flights, landed: the number of launched flights, and of landed flights.
        bytes: bytes sent by this rank in all flights, by part of the network ("flat", "intra", "inter").
    """

    rule: str
    number: int
    bucket: int
    values: int
    dtype: str
    flights: int
    landed: int
    bytes: dict[str, float]
    _flights: tuple[Collective, ...] = field(repr=False)
    _kinds: Sequence[tuple[tuple[SentFormat, ...], int]] = field(repr=False, default=())  # `Ledger.kinds`

    @cached_property
    def ways(self) -> dict[SentFormat, int]:
        """Return {format: number of landed flights that used it}. Formats of the latest flight come first.

        The dict is empty if the stage was asked for no format, and so sends values in the dtype of the bucket.
        """
        flights: Counter[SentFormat] = Counter()
        for formats, count in self._kinds:
            flights.update(dict.fromkeys((each.in_words() for each in formats), count))
        return dict(flights)

    @cached_property
    def latest(self) -> tuple[SentFormat, ...]:
        """Return the formats in which the latest landed flight sent values."""
        return tuple(dict.fromkeys(each.in_words() for formats, _ in self._kinds[:1] for each in formats))

    @property
    def asked(self) -> str:
        """Return the format requested for the latest landed flight, such as "MinMaxUInt8()"; "" if none was."""
        return " + ".join(dict.fromkeys(way.asked for way in self.latest))

    @property
    def flew(self) -> str:
        """Return the format in which the latest flight sent values; "" if none was asked for.

        It is an expression such as "MinMaxUInt8()", a dtype such as "float32", or "nothing"; " + " joins several.
        """
        return " + ".join(dict.fromkeys(way.flew for way in self.latest))

    @property
    def reason(self) -> str:
        """Return why the latest flight saved fewer bytes than requested, and "in one kernel" if it went so; or ""."""
        return "; ".join(dict.fromkeys(way.reason for way in self.latest if way.reason))

    @property
    def bytes_sent(self) -> float:
        """Return the bytes sent by this rank in all flights, over all parts of the network."""
        return sum(self.bytes.values())

    @cached_property
    def _times(self) -> list[tuple[float, float]]:
        return [flight.flight.seconds() for flight in self._flights if flight.flight.over()]

    @property
    def seconds(self) -> float:
        """Return the seconds of work on the lane: the mean over the latest flights that the device has finished."""
        return sum(air for air, _ in self._times) / max(1, len(self._times))

    @property
    def exposed(self) -> float:
        """Return the seconds for which training waited for a flight: the mean over the same flights as `seconds`."""
        return sum(wait for _, wait in self._times) / max(1, len(self._times))


def row_of(
    ledger: Ledger, rule: str, number: int, bucket: int, values: int, dtype: Any, in_air: Container[Collective] = ()
) -> Row:
    """Return the row of a bucket, from the present state of its ledger."""
    flown = tuple(flight for flight in ledger.flights if flight not in in_air)
    landed = ledger.launches - (len(ledger.flights) - len(flown))
    which = (rule, number, bucket, values, str(dtype).removeprefix("torch."))
    return Row(*which, ledger.launches, landed, dict(ledger.sent), flown, list(ledger.kinds))


def table(rows: Sequence[Row], parts: Sequence[str]) -> list[str]:
    """Return the lines of a table: each rule as text, and below it a line for each bucket, with amounts per flight.

    A rule with several buckets also has a line with their sums. If rules ask for formats, a column shows those of the
    latest flights, with the lines of `reasons` below. Each of `parts` of the network has a column of bytes.
    """
    formats = any(row.flew for row in rows)
    head = ("", "values", "dtype", "flights", *["flew as"] * formats, "sent each", *parts, "on the lane", "exposed")

    def cells(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
        sent = [sum(row.bytes_sent / max(1, row.flights) for row in rows)]
        sent += [sum(row.bytes.get(part, 0) / max(1, row.flights) for row in rows) for part in parts]
        flew = {row.flew for row in rows}
        return (
            name,
            f"{sum(row.values for row in rows):,}",
            "/".join(dict.fromkeys(row.dtype for row in rows)),
            f"{max(row.flights for row in rows):,}",
            *[min(flew) * (len(flew) == 1)] * formats,
            *map(size, sent),
            milliseconds(sum(row.seconds for row in rows)),
            milliseconds(sum(row.exposed for row in rows)),
        )

    lines: list[str | tuple[str, ...]] = [head]
    for _, group in groupby(rows, key=lambda row: row.number):
        buckets = list(group)
        lines += [buckets[0].rule, *(cells(f"bucket {row.bucket}", [row]) for row in buckets)]
        lines += [*[cells("all", buckets)] * (len(buckets) > 1), *reasons(buckets)]
    columns = zip(*(line for line in lines if isinstance(line, tuple)), strict=True)
    widths = [max(map(len, column)) for column in columns]
    widths[0] += 2
    return [line if isinstance(line, str) else "   ".join(map(str.rjust, line, widths)) for line in lines]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return a line for each format that has a `reason` or was used in some flights only: its buckets and flights."""
    buckets: dict[str, list[int]] = {}
    for row in rows:
        flights = sum(count for _, count in row._kinds)
        for way, count in row.ways.items():
            if way.reason or count < flights:
                buckets.setdefault(way.line(count, flights), []).append(row.bucket)
    return [f"  {numbered(which)}{line}" for line, which in buckets.items()]


def numbered(buckets: list[int]) -> str:
    """Return the numbers of buckets in rising order as text, such as "buckets 0-3, 7"."""
    runs = [[b for _, b in run] for _, run in groupby(enumerate(buckets), key=lambda each: each[1] - each[0])]
    listed = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
    return f"bucket{'s' * (len(buckets) > 1)} {listed}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


def size(nbytes: float) -> str:
    """Return a number of bytes as text, with a unit and at most four digits."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"


@dataclass(frozen=True, eq=False)
class Report:
    """The report of an attachment up to now. `print` shows it as a table.

    Attributes:
        steps: optimizer steps since the buckets were made.
        ranks, groups: the number of ranks, and of process groups that the attachment has made.
        rows: one for each bucket of each rule.
        seconds_per_step: the mean time of the latest steps; None with one rank, or before the first step.
    """

    steps: int
    ranks: int
    groups: int
    rows: tuple[Row, ...]
    seconds_per_step: float | None = None

    @property
    def bytes_sent(self) -> float:
        """Return the bytes sent by this rank."""
        return sum(row.bytes_sent for row in self.rows)

    @property
    def bytes_per_step(self) -> float:
        """Return the bytes sent by this rank in each optimizer step."""
        return self.bytes_sent / max(1, self.steps)

    @property
    def exposed_per_step(self) -> float:
        """Return the seconds for which training waited in each optimizer step:  Σ_rows exposed · landed / steps."""
        return self._per_step(row.exposed * row.landed for row in self.rows)

    @property
    def exposed_share(self) -> float | None:
        """Return the ratio of `exposed_per_step` to the length of a step; None if the length is not known."""
        return self.exposed_per_step / self.seconds_per_step if self.seconds_per_step else None

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the parts of the network in which anything was sent: "flat", or "intra" and "inter"."""
        return tuple(sorted({part for row in self.rows for part in row.bytes}))

    def scalars(self) -> dict[str, float]:
        """Return {name: number}, for TensorBoard, wandb or Lightning's `log_dict`. Names begin with `baguakit/`.

        The names are `bytes_per_step`, `exposed_seconds_per_step`, `air_seconds_per_step`, and `exposed_share` once it
        is known; and `bytes_per_step_intra` and `_inter` if both parts are used. If there are several rules, the first
        three names also exist for each rule, as `baguakit/rule_0/…` in the order of `att.rules`.
        """
        several = len({row.number for row in self.rows}) > 1
        figures = {"baguakit": self.rows}
        for number, group in groupby(self.rows, key=lambda row: row.number) if several else ():
            figures[f"baguakit/rule_{number}"] = tuple(group)
        named = {}
        for prefix, rows in figures.items():
            named[f"{prefix}/bytes_per_step"] = self._per_step(row.bytes_sent for row in rows)
            named[f"{prefix}/exposed_seconds_per_step"] = self._per_step(row.exposed * row.landed for row in rows)
            named[f"{prefix}/air_seconds_per_step"] = self._per_step(row.seconds * row.landed for row in rows)
        if self.exposed_share is not None:
            named["baguakit/exposed_share"] = self.exposed_share
        for part in self.parts if len(self.parts) > 1 else ():
            named[f"baguakit/bytes_per_step_{part}"] = self._per_step(row.bytes.get(part, 0) for row in self.rows)
        return named

    def _per_step(self, amounts: Iterable[float]) -> float:
        return sum(amounts) / max(1, self.steps)

    def __str__(self) -> str:
        length = f" of {milliseconds(self.seconds_per_step)}" if self.seconds_per_step else ""
        share = f" ({self.exposed_share:.1%})" if self.exposed_share is not None else ""
        numbers = {"step": self.steps, "rank": self.ranks, "group": self.groups}
        steps, ranks, groups = (f"{number:,} {noun}{'s' * (number != 1)}" for noun, number in numbers.items())
        summary = (
            f"{steps}{length} on {ranks}, {groups}; {size(self.bytes_per_step)} sent a step, "
            f"{milliseconds(self.exposed_per_step)} exposed{share}"
        )
        return "\n".join([summary, *table(self.rows, self.parts if len(self.parts) > 1 else ())])

    __repr__ = __str__


def make_report(life: Life[Any]) -> Report:
    """Return the current report of attached rules, without waiting for flights."""
    rows = []
    for runner in life.runners:
        in_air = runner.flights()
        for i, (flat, ledger) in enumerate(zip((b.flat for b in runner.buckets), runner.ledgers, strict=True)):
            rows.append(row_of(ledger, runner.label, runner.index, i, flat.numel(), flat.dtype, in_air))
    steps, ranks, groups = life.clock.step - life.since, life.runtime.comm.size, len(life.runtime.groups())
    return Report(steps, ranks, groups, tuple(rows), life.log.seconds_per_step())


def written(scalars: Mapping[str, float], writer: Any, step: int) -> dict[str, float]:
    """Call `writer.add_scalar(name, value, step)` for each scalar, if there is a writer, and return the scalars."""
    if writer is not None and not callable(getattr(writer, "add_scalar", None)):
        raise TypeError(
            "writer is one with add_scalar(name, value, step), such as torch.utils.tensorboard.SummaryWriter, and not "
            f"{describe(writer)}; give another logger att.report().scalars()"
        )
    for name, value in scalars.items() if writer is not None else ():
        writer.add_scalar(name, value, step)
    return dict(scalars)
