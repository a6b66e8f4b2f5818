"""Run `topk.c`, which has the operations of `topk.py` for CPUs: the same bytes. The definition adds to fp64 tensors."""

from ctypes import c_int64

import torch
from torch import Tensor

from . import cpu, topk

join_ = topk.join_  # selecting takes far more time


def select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x, (rows, n) = x.contiguous(), x.shape
    places = torch.empty(rows, n // chunk * k + rest, dtype=torch.int32)
    values = torch.empty(places.shape, dtype=torch.float32)
    sizes = rows, n, chunk, k, rest, cpu.threads(x.numel())
    cpu.call("topk", "topk_select", x, residual, places, values, cpu.DTYPES.index(x.dtype), *sizes)
    return places, values


def add_(
    out: Tensor, packed: Tensor, values: Tensor | None, weights: Tensor | None, chunk: int, k: int, rest: int,
    ok: Tensor | None = None,
) -> None:  # fmt: skip
    if out.dtype == torch.float64:
        return topk.add_(out, packed, values, weights, chunk, k, rest, ok)
    n, (rows, row_bytes), count = len(out), packed.shape, len(out) // chunk * k + rest
    if values is None:
        values = packed[:, topk.values_at(count, chunk) :]
    stride, bits = values.stride(0) * values.itemsize, chunk.bit_length() - 1
    sizes = rows, row_bytes, stride, n, chunk, k, count, bits, cpu.threads(max(n, rows * count))
    tensors, outside = (out, packed, values, weights, ok), (c_int64 * 1)()
    if rows:
        cpu.call("topk", "topk_add", *tensors, outside, cpu.DTYPES.index(out.dtype), *sizes)
    if outside[0]:
        raise IndexError(topk.OUTSIDE.format(n))
