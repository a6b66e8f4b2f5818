"""The CPU kernels for the k largest values of each chunk: the same bytes as the definition. They are in `topk.c`."""

from ctypes import c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from . import cpu, topk

SOURCE = Path(__file__).with_name("topk.c")


def _call(name: str, *arguments: Tensor | int | None) -> int:
    """Call a C function with whole numbers, and the addresses of tensors (NULL for None)."""
    given = [c_void_p(each.data_ptr()) if isinstance(each, Tensor) else each for each in arguments]
    result: int = getattr(cpu.functions(SOURCE), name)(*(c_int64(x) if isinstance(x, int) else x for x in given))
    return result


def select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Select the kept values. Arguments and results are those of `topk.select`."""
    x = x.contiguous()
    rows, n = x.shape
    places = torch.empty(rows, n // chunk * k + rest, dtype=torch.int32)
    values = torch.empty(places.shape, dtype=torch.float32)
    sizes = rows, n, chunk, k, rest, cpu.threads(x.numel())
    _call("topk_select", x, cpu.DTYPES.index(x.dtype), residual, places, values, *sizes)
    return places, values


def join_(packed: Tensor, places: Tensor, values: Tensor | None, chunk: int, ok: Tensor | None = None) -> None:
    """Write packed rows. Arguments are those of `topk.join_`."""
    if ok is not None:
        ok.fill_(True)
    rows, count = places.shape
    if packed.numel():
        at = topk.values_at(count, chunk)
        _call("topk_join", packed, places, values, rows, packed.shape[1], at, count, chunk.bit_length() - 1, 1)


def add_(
    out: Tensor, packed: Tensor, values: Tensor | None, weights: Tensor | None, chunk: int, k: int, rest: int,
    ok: Tensor | None = None,
) -> None:  # fmt: skip
    """Add packed rows to `out`. Arguments are those of `topk.add_`."""
    n, count = len(out), len(out) // chunk * k + rest
    if values is None:
        values = packed[:, topk.values_at(count, chunk) :]
    rows, row_bytes = packed.shape
    stride, bits = values.stride(0) * values.itemsize, chunk.bit_length() - 1
    sizes = rows, row_bytes, stride, n, chunk, k, count, bits, cpu.threads(max(n, rows * count))
    if rows and _call("topk_add", out, cpu.DTYPES.index(out.dtype), packed, values, weights, ok, *sizes):
        raise IndexError(topk.OUTSIDE.format(n))
