"""The operations of `definition.py` on few values on a CPU, by NumPy, with the same bits.

They exist because calls of torch take longer: to compress, reduce and decompress 1,024, 4,096 and 16,384 values takes
53, 63 and 101 μs here and 270, 286 and 346 μs by torch; in one hop of two ranks, 30, 36 and 64 μs and 116, 133 and
163 μs (CPU time, one thread of a shared x86 virtual machine, November 2026).

A format has its arithmetic for arrays, with a byte for each value and headers of fp32. Rounding is not drawn.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from .format import Array, Format
from .layout import Layout

Operation = TypeVar("Operation", bound=Callable[..., Any])


def without_warnings(operation: Operation) -> Operation:
    """Let an operation pass infinities and NaN without NumPy's warnings, as torch does."""

    @wraps(operation)
    def wrapped(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):  # one for each call: before NumPy 2 threads could not share it
            return operation(*arguments)

    return cast(Operation, wrapped)


@without_warnings
def compress(format: Format, x: Tensor, block: int, residual: Tensor | None = None, key: None = None) -> Tensor:
    values = x.float().numpy()
    packed = _pack(format, values, block)
    if residual is not None:
        residual.copy_(torch.from_numpy(values - _unpack(format, packed, x.shape[1], block)))
    return torch.from_numpy(packed)


@without_warnings
def decompress_(format: Format, out: Tensor, packed: Tensor, block: int) -> None:
    # Torch does the writing, since it keeps account of what is written.
    out.copy_(torch.from_numpy(_unpack(format, packed.numpy(), out.shape[1], block)))


@without_warnings
def add_(format: Format, out: Tensor, packed: Tensor, weights: Tensor, block: int) -> None:
    total = out.float().numpy().copy()
    for row, weight in zip(_unpack(format, packed.numpy(), len(total), block), weights.tolist(), strict=True):
        total += row * weight
    out.copy_(torch.from_numpy(total))


@without_warnings
def reduce(
    format: Format, packed: Tensor, n: int, block: int, residual: Tensor | None = None, key: None = None
) -> Tensor:
    mean, rows = np.zeros(n, np.float32), np.float32(len(packed))
    for row in _unpack(format, packed.numpy(), n, block):
        mean += row
    mean /= rows
    sent = _pack(format, mean[None], block)
    if residual is not None:
        residual += torch.from_numpy((mean - _unpack(format, sent, n, block)[0]) * rows)
    return torch.from_numpy(sent)


def _pack(format: Format, x: Array, block: int) -> Array:
    """Return the packed rows of `x` (rows, n)."""
    (rows, n), arithmetic = x.shape, format.arrays
    assert arithmetic is not None
    layout = format.layout(n, block)
    packed = np.zeros((rows, layout.row), np.uint8)
    headers = _headers(layout, packed)
    for run in layout.runs:
        values = x[:, run.columns].reshape(rows, -1, run.width)
        header, scale = arithmetic.measure(values)
        headers[:, run.blocks] = header
        packed[:, run.columns] = arithmetic.encode(values, header, scale).reshape(rows, -1)
    return packed


def _unpack(format: Format, packed: Array, n: int, block: int) -> Array:
    """Return the values (rows, n) of packed rows."""
    rows, arithmetic = len(packed), format.arrays
    assert arithmetic is not None
    values = np.empty((rows, n), np.float32)
    layout = format.layout(n, block)
    headers = _headers(layout, packed)
    for run in layout.runs:
        blocks = packed[:, run.columns].reshape(rows, -1, run.width)
        values[:, run.columns] = arithmetic.decode(blocks, headers[:, run.blocks]).reshape(rows, -1)
    return values


def _headers(layout: Layout, packed: Array) -> Array:
    """Return the headers (rows, blocks, numbers) of packed rows, as a view."""
    headers = packed[:, layout.header_at : layout.header_end].view(np.float32)
    return headers.reshape(len(packed), *layout.headers)
