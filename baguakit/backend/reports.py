"""The report of the backend: how each operation flew."""

import threading
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """Calls of one operation that flew alike.

    Attributes:
        operation: its name.
        calls: how many.
        bytes: that this rank sent, without headers; of an exact operation, those of the usual algorithm.
        format: in which values were sent: the `repr` of a compressor, or "exact".
        reason: why it was exact; "" if it was not.
    """

    operation: str
    calls: int
    bytes: float
    format: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The operations of all groups of this process since it began. `str` gives a table.

    Attributes:
        rows: one for each operation, format and reason.
    """

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [("operation", "calls", "MB sent", "flew as", "reason")]
        lines += [(r.operation, f"{r.calls:,}", f"{r.bytes / 1e6:.2f}", r.format, r.reason) for r in self.rows]
        a, b, c, d, _ = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join(f"{o:<{a}}  {n:>{b}}  {mb:>{c}}  {f:<{d}}  {why}".rstrip() for o, n, mb, f, why in lines)


_counts: dict[tuple[str, Any, Any], tuple[int, float]] = {}
_lock = threading.Lock()


def count(operation: str, nbytes: float, flew: Any = "exact", reason: Any = "") -> None:
    """Count a call of an operation."""
    with _lock:
        calls, total = _counts.get((operation, flew, reason), (0, 0.0))
        _counts[operation, flew, reason] = calls + 1, total + nbytes


def report() -> Report:
    """Return how the operations of all groups of this backend have flown so far on this rank. Local."""
    with _lock:
        found = [Row(name, calls, sent, str(flew), str(why)) for (name, flew, why), (calls, sent) in _counts.items()]
    return Report(tuple(sorted(found, key=lambda row: (row.operation, row.format, row.reason))))
