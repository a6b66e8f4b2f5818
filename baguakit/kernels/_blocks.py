"""Rows of values in blocks, for the definitions of blockwise formats."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

CACHED = 1 << 20  # values that stay in cache from one compiled unit to the next


def aligned(count: int) -> int:
    """Round up to 16 bytes, so that every part of a row can be read 16 bytes at a time."""
    return (count + 15) // 16 * 16


def blocks_of(n: int, block: int | None) -> int:
    """How many blocks hold `n` values; without `block`, they are one."""
    return -(-n // (block or max(n, 1)))


class Run(NamedTuple):
    """Columns that are blocks of `width` values."""

    columns: slice
    blocks: slice
    width: int

    def of(self, values: Tensor) -> Tensor:
        return values[..., self.columns].view(*values.shape[:-1], -1, self.width)

    def headers(self, headers: Tensor) -> Tensor:
        return headers[..., self.blocks, :]


def runs_of(n: int, block: int | None) -> Iterator[Run]:
    width = block or max(n, 1)
    whole, stride = n // width * width, max(CACHED // width, 1) * width
    for start in range(0, whole, stride):
        stop = min(start + stride, whole)
        yield Run(slice(start, stop), slice(start // width, stop // width), width)
    if n > whole:
        yield Run(slice(whole, n), slice(whole // width, None), n - whole)
