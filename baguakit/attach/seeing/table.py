"""The table of a report, and its numbers as text."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from ..runners.ways import numbered
from .row import Row

HEAD = ("", "values", "dtype", "flights", "flew as", "sent each", "on the lane", "exposed")


def table(rows: Sequence[Row], parts: Sequence[str]) -> list[str]:
    """Return a line for each bucket, under the rule in words; bytes and times are of one flight.

    A rule of several buckets has a line for all of them: they are launched equally often. If formats were asked for, a
    column has those in which the latest flights were sent, and below the buckets stands why others were used.

    Args:
        rows: of the report.
        parts: of the network that have a column each.
    """
    formats = any(row.flew for row in rows)
    lines: list[str | tuple[str, ...]] = [("", *HEAD[1:4], *HEAD[4:5] * formats, HEAD[5], *parts, *HEAD[6:])]
    for _, group in groupby(rows, key=lambda row: row.number):
        buckets = list(group)
        lines.append(buckets[0].rule)
        lines += [cells(f"bucket {row.bucket}", [row], parts, formats) for row in buckets]
        lines += [cells("all", buckets, parts, formats)] * (len(buckets) > 1)
        lines += reasons(buckets)
    columns = zip(*(line for line in lines if isinstance(line, tuple)), strict=True)
    widths = [max(map(len, column)) for column in columns]
    widths[0] += 2
    return [line if isinstance(line, str) else "   ".join(map(str.rjust, line, widths)) for line in lines]


def reasons(rows: Sequence[Row]) -> list[str]:
    """Return a line for each way that saved less than was asked for, and for each of several ways of one bucket.

    It names the buckets, and the number of flights if not all flew so.
    """
    buckets: dict[str, list[int]] = {}
    for row in rows:
        flights = sum(count for _, count in row._kinds)
        for way, count in row.ways.items():
            if way.reason or count < flights:
                buckets.setdefault(way.line(count, flights), []).append(row.bucket)
    return [f"  {numbered(which)}{line}" for line, which in buckets.items()]


def cells(name: str, rows: Sequence[Row], parts: Iterable[str], formats: bool) -> tuple[str, ...]:
    """Return the cells of one line: of a bucket, or of several that are launched together."""

    def sent(part: str | None) -> str:
        each = (row.bytes_sent if part is None else row.bytes.get(part, 0) for row in rows)
        return size(sum(nbytes / max(1, row.flights) for nbytes, row in zip(each, rows, strict=True)))

    return (
        name,
        f"{sum(row.values for row in rows):,}",
        "/".join(dict.fromkeys(row.dtype for row in rows)),
        f"{max(row.flights for row in rows):,}",
        *[rows[0].flew * (len({row.flew for row in rows}) == 1)] * formats,
        sent(None),
        *(sent(part) for part in parts),
        milliseconds(sum(row.seconds for row in rows)),
        milliseconds(sum(row.exposed for row in rows)),
    )


def counted(number: int, noun: str) -> str:
    """Return a number with a noun."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def milliseconds(seconds: float) -> str:
    """Return seconds as text in ms."""
    return f"{1e3 * seconds:,.2f} ms"


def size(nbytes: float) -> str:
    """Return bytes as text with three or four digits."""
    for unit in ("B", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} GB"
