"""The operations of `blockwise.py` on few values on a CPU, by NumPy: torch's calls take three times as long as its.

The bits are the same. It takes formats that have their arithmetic for arrays, with a byte for each value and headers of
fp32, and rounding that is not drawn.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from ..cpu import units
from .format import Arithmetic, Array, Format
from .layout import blocks_of, runs_of

MOST = 1 << 16  # values or bytes of all rows: more are done sooner by what a compiler makes of `blockwise.py`

Operation = TypeVar("Operation", bound=Callable[..., Any])


def silent(operation: Operation) -> Operation:
    """Let an operation keep quiet, as torch does, about infinities and what is not a number."""

    @wraps(operation)
    def quietly(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):  # one for each call: before NumPy 2 threads could not share it
            return operation(*arguments)

    return cast(Operation, quietly)


def takes(format: Format, values: Tensor) -> bool:
    """Whether this is where `values`, or packed rows, of a format belong."""
    few = 0 < values.numel() <= MOST and values.is_cpu
    return few and format.arrays is not None and not units.is_eager()


@silent
def compress(format: Format, x: Tensor, block: int | None, residual: Tensor | None = None, key: None = None) -> Tensor:
    values = x.float().numpy()
    packed = _pack(format, values, block)
    if residual is not None:
        residual.copy_(torch.from_numpy(values - _unpack(format, packed, x.shape[1], block)))
    return torch.from_numpy(packed)


@silent
def decompress_(format: Format, out: Tensor, packed: Tensor, block: int | None) -> None:
    # Torch does the writing, since it keeps account of what is written.
    out.copy_(torch.from_numpy(_unpack(format, packed.numpy(), out.shape[1], block)))


@silent
def add_(format: Format, out: Tensor, packed: Tensor, weights: Tensor, block: int | None) -> None:
    total = out.float().numpy().copy()
    for row, weight in zip(_unpack(format, packed.numpy(), len(total), block), weights.tolist(), strict=True):
        total += row * weight
    out.copy_(torch.from_numpy(total))


@silent
def reduce(
    format: Format, packed: Tensor, n: int, block: int | None, residual: Tensor | None = None, key: None = None
) -> Tensor:
    mean, rows = np.zeros(n, np.float32), np.float32(len(packed))
    for row in _unpack(format, packed.numpy(), n, block):
        mean += row
    mean /= rows
    sent = _pack(format, mean[None], block)
    if residual is not None:
        residual += torch.from_numpy((mean - _unpack(format, sent, n, block)[0]) * rows)
    return torch.from_numpy(sent)


def _pack(format: Format, x: Array, block: int | None) -> Array:
    """The packed rows of `x` (rows, n)."""
    (rows, n), arithmetic = x.shape, _arithmetic(format)
    packed = np.zeros((rows, format.row_bytes(n, block)), np.uint8)
    codes, headers = _parts(format, packed, n, block)
    for run in runs_of(n, block):
        values = x[:, run.columns].reshape(rows, -1, run.width)
        header, scale = arithmetic.measure(values)
        headers[:, run.blocks] = header
        codes[:, run.columns] = arithmetic.encode(values, header, scale).reshape(rows, -1)
    return packed


def _unpack(format: Format, packed: Array, n: int, block: int | None) -> Array:
    """The values (rows, n) of packed rows."""
    rows, arithmetic = len(packed), _arithmetic(format)
    values = np.empty((rows, n), np.float32)
    codes, headers = _parts(format, packed, n, block)
    for run in runs_of(n, block):
        blocks = codes[:, run.columns].reshape(rows, -1, run.width)
        values[:, run.columns] = arithmetic.decode(blocks, headers[:, run.blocks]).reshape(rows, -1)
    return values


def _parts(format: Format, packed: Array, n: int, block: int | None) -> tuple[Array, Array]:
    """The codes (rows, n) of packed rows and their headers (rows, blocks, numbers), as views."""
    at, count = format.header_at(n, block), blocks_of(n, block)
    headers = packed[:, at : at + format.header_bytes * count].view(np.float32)
    return packed[:, :n], headers.reshape(len(packed), count, -1)


def _arithmetic(format: Format) -> Arithmetic:
    assert format.arrays is not None, "it is not one that is taken"
    return format.arrays
