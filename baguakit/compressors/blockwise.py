"""Blocks of values, each value as a few bits and each block headed by a few bytes."""

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import check_fields, integer, shown
from ..kernels.blockwise.operators import Operators
from ..kernels.shared.tracing import recorded
from .base import (
    MOST,
    Compressor,
    Unchecked,
    check_rows,
    output_for,
    packed_of,
    residual_of,
    sum_into,
    values_of,
    weights_of,
)

BLOCKS = tuple(1 << power for power in range(6, 14))


class Blockwise(Compressor):
    """A format in blocks: `block` values share a header; `stochastic` selects unbiased rounding."""

    block: int
    as_given: ClassVar[bool] = True  # no subclass has operations of its own

    @property
    def operators(self) -> Operators:
        """Return the operations of the format."""
        raise NotImplementedError

    @property
    def drawn(self) -> bool:
        """Return whether rounding is drawn at random."""
        return getattr(self, "stochastic", False)

    def __init_subclass__(cls) -> None:
        cls.as_given = cls.as_given and vars(cls).keys().isdisjoint(Unchecked._fields)

    def __post_init__(self) -> None:
        if isinstance(self.block, int) and self.block in BLOCKS:
            return check_fields(self)
        name = type(self).__name__
        raise ValueError(
            f"{name} takes a block of {BLOCKS[0]} to {BLOCKS[-1]} values, a power of two, not {shown(self.block)};"
            f" {name}() takes {type(self).block}"
        )

    def row_bytes(self, n: int) -> int:
        integer("n", n, 0, MOST)
        return self.operators.format.row_bytes(n, self.block)

    @torch.no_grad()
    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        x = values_of(x, key)
        return self.operators.on(x).compress(x, self.block, residual_of(residual, x.shape, x), self._key(key))

    @torch.no_grad()
    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        packed = packed_of(packed, self, n)
        out = output_for(out, packed, n, dtype)
        self.operators.on(packed).decompress_(out, packed, self.block)
        return out

    @torch.no_grad()
    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        packed = packed_of(packed, self, sum_into(out, packed).shape[0])
        self.operators.on(packed).add_(out.detach(), packed, weights_of(weights, packed), self.block)
        return out

    @torch.no_grad()
    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        packed = packed_of(packed, self, n)
        check_rows(packed, key)
        return self.operators.on(packed).reduce(
            packed, n, self.block, residual_of(residual, (n,), packed), self._key(key)
        )

    def _unchecked(self, x: Tensor) -> Unchecked:
        if not self.as_given or recorded(x):
            return super()._unchecked(x)
        return _operations(self.operators, self.block, self.drawn)

    def _key(self, key: int) -> int | None:
        return _signed(key) if self.drawn else None


def _signed(key: int) -> int:
    """Return any integer as a signed 64-bit one, which the operator's argument is."""
    return (key + (1 << 63)) % (1 << 64) - (1 << 63)


@cache
def _operations(operators: Operators, block: int, drawn: bool) -> Unchecked:
    direct, format = operators.direct, operators.format

    def row_bytes(n: int) -> int:
        return format.layout(n, block).row

    def compress(x: Tensor, residual: Tensor | None, key: int) -> Tensor:
        return direct.compress(x, block, residual, _signed(key) if drawn else None)

    def decompress(packed: Tensor, n: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty(packed.shape[0], n, dtype=dtype, device=packed.device)
        direct.decompress_(out, packed, block)
        return out

    def reduce(packed: Tensor, n: int, residual: Tensor | None, key: int) -> Tensor:
        return direct.reduce(packed, n, block, residual, _signed(key) if drawn else None)

    return Unchecked(row_bytes, compress, decompress, reduce)
