"""Blocks of values, each value as a few bits and each block headed by a few bytes."""

from functools import cache

import torch
from torch import Tensor

from ..arguments import check_fields, describe, integer
from ..kernels.operators import Operators, recorded
from .base import MOST, Checked, Unchecked

BLOCKS = tuple(1 << power for power in range(6, 14))


class Blockwise(Checked):
    """A format in blocks: `block` values share a header; `stochastic` selects unbiased rounding."""

    block: int

    @property
    def operators(self) -> Operators:
        """Return the operations of the format."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        if isinstance(self.block, int) and self.block in BLOCKS:
            return check_fields(self)
        name = type(self).__name__
        raise ValueError(
            f"{name} takes a block of {BLOCKS[0]} to {BLOCKS[-1]} values, a power of two, not {describe(self.block)};"
            f" {name}() takes {type(self).block}"
        )

    def row_bytes(self, n: int) -> int:
        integer("n", n, 0, MOST)
        return self.operators.format.row_bytes(n, self.block)

    def _compress(self, x: Tensor, residual: Tensor | None, key: int) -> Tensor:
        return self.operators.compress(x, self.block, residual, self._key(key))

    def _decompress_(self, out: Tensor, packed: Tensor) -> None:
        self.operators.decompress_(out, packed, self.block)

    def _add_(self, out: Tensor, packed: Tensor, weights: Tensor) -> None:
        self.operators.add_(out, packed, weights, self.block)

    def _reduce(self, packed: Tensor, n: int, residual: Tensor | None, key: int) -> Tensor:
        return self.operators.reduce(packed, n, self.block, residual, self._key(key))

    def _unchecked(self, x: Tensor) -> Unchecked:
        if not self.as_given or recorded(x):
            return super()._unchecked(x)
        return _direct(self.operators, self.block, self._drawn)

    @property
    def _drawn(self) -> bool:
        """Return whether rounding is drawn at random."""
        return getattr(self, "stochastic", False)

    def _key(self, key: int) -> int | None:
        return signed(key) if self._drawn else None


def signed(key: int) -> int:
    """Return any integer as a signed 64-bit one, which the operator's argument is."""
    return (key + (1 << 63)) % (1 << 64) - (1 << 63)


@cache
def _direct(operators: Operators, block: int, drawn: bool) -> Unchecked:
    """Return the operations for primitives, found once: on a GPU the host's time is theirs."""
    compress, reduce = operators.compress.function, operators.reduce.function
    decompress_ = operators.decompress_.function

    def decompress(packed: Tensor, n: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        if out is None:
            out = torch.empty(packed.shape[0], n, dtype=dtype, device=packed.device)
        decompress_(out, packed, block)
        return out

    return Unchecked(
        lambda n: operators.format.layout(n, block).row,
        lambda x, residual, key: compress(x, block, residual, signed(key) if drawn else None),
        decompress,
        lambda packed, n, residual, key: reduce(packed, n, block, residual, signed(key) if drawn else None),
    )
