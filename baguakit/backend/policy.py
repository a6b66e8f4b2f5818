"""The policy of the backend (which collectives are compressed), and the report of how each call was sent."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import Natural, Range, check_fields, one_of
from ..compressors import Compressor, MinMaxUInt8, check_dense
from ..expressions import expression
from ..kernels.cpu import DTYPES

OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


@dataclass(frozen=True)
class Policy:
    """The choice of collectives to compress: those that sum, average or move large floating-point tensors.

    Other calls are exact: MAX, MIN, PRODUCT, broadcasts, messages between two ranks, calls on small or integer tensors.

    Args:
        compressor: such as `compressors.UInt4()`. None sends values uncompressed, which is useful with `flows`.
        operations: the collectives to compress, any of "all_reduce", "reduce_scatter", "all_gather" and "all_to_all".
        least: the smallest number of bytes to compress, summed over all tensors that a call reduces, scatters or
            gathers. In an all-to-all, sizes differ among ranks, so a message is compressed if it becomes smaller.
        flows: the number of connections to each peer, as in `Comm`. It applies to tensors on the CPU only.
        compare: with each call for tensors on the CPU, send every other rank 128 bytes that describe the call. If
            calls differ, an error names the ranks at once; exact calls begin only when all ranks agree. If False, this
            error comes one or two heartbeats later, and gloo may have mixed values or ended a process before.

    Raises:
        TypeError: the compressor is sparse, such as `TopK`; an argument is of another type.
        ValueError: an operation is unknown, `least` is negative, or `flows` is not 1 to 64.
    """

    compressor: Compressor | None = MinMaxUInt8()
    operations: tuple[str, ...] = OPERATIONS
    least: Natural = 1 << 16
    flows: Annotated[int, Range(1, 64)] = 1
    compare: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.compressor is not None:
            check_dense("compressor", self.compressor)
        for each in self.operations:
            one_of("operations", each, OPERATIONS)

    def __repr__(self) -> str:
        return expression(self)

    def objection(self, operation: str, tensors: Sequence[Tensor], op: Any, size: int) -> str:
        """Return the reason why an operation is exact, or "" if the policy applies. All ranks get the same text.

        `tensors` are all tensors that the `size` ranks reduce, scatter or gather; `op` is None except for reductions.
        """
        if size == 1:
            return "one rank"
        if _inside:
            return "within exact()"
        if operation not in self.operations or (self.compressor is None and self.flows == 1):
            return "not in the policy"
        if op is not None and not (op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG):
            return name_of(op)
        nbytes = 0
        for x in tensors:
            if x.layout is not torch.strided or x.dtype not in DTYPES:
                return "sparse" if x.layout is not torch.strided else str(x.dtype).removeprefix("torch.")
            nbytes += x.nbytes
        if operation != "all_to_all" and nbytes < self.least:
            return f"less than {self.least:,} bytes"
        return ""


def name_of(op: Any) -> str:
    return str(getattr(op, "op", op).name)


_inside: list[None] = []  # one for each block that the process is in, on all threads: backward runs on other threads


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Return a context in which this process begins only exact collectives. All ranks use it for the same calls.

    Use it for sums that must be exact, such as sums of metrics and counters:

        with bk.backend.exact():
            dist.all_reduce(correct)

    If only some ranks make a call in the context, a `PeerError` names these ranks.
    """
    _inside.append(None)
    try:
        yield
    finally:
        _inside.pop()


@dataclass(frozen=True)
class Row:
    """Calls of one operation that were sent in the same way.

    Attributes:
        operation: the name of the operation.
        calls: the number of calls.
        bytes: the bytes sent by this rank, without headers; for exact calls, the bytes that the usual algorithm sends.
        format: the format in which values were sent: the `repr` of a compressor, or "exact".
        reason: why the calls were exact; "" if they were not.
    """

    operation: str
    calls: int
    bytes: float
    format: str
    reason: str


@dataclass(frozen=True)
class Report:
    """The operations of all groups since the process began. `str` returns a table of the `rows`."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        lines = [("operation", "calls", "MB sent", "flew as", "reason")]
        lines += [(r.operation, f"{r.calls:,}", f"{r.bytes / 1e6:.2f}", r.format, r.reason) for r in self.rows]
        a, b, c, d, _ = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join(f"{o:<{a}}  {n:>{b}}  {mb:>{c}}  {f:<{d}}  {why}".rstrip() for o, n, mb, f, why in lines)


_counts: dict[tuple[str, Any, Any], tuple[int, float]] = {}
_lock = threading.Lock()


def count(operation: str, nbytes: float, flew: Any, reason: Any) -> None:
    with _lock:
        calls, total = _counts.get((operation, flew, reason), (0, 0.0))
        _counts[operation, flew, reason] = calls + 1, total + nbytes


def report() -> Report:
    """Return a report of how this rank has sent operations so far, in all groups of this backend. Local."""
    with _lock:
        found = [Row(name, calls, sent, str(flew), str(why)) for (name, flew, why), (calls, sent) in _counts.items()]
    return Report(tuple(sorted(found, key=lambda row: (row.operation, row.format, row.reason))))
