"""Blocks of values, each value as a few bits and each block headed by a few bytes."""

from torch import Tensor

from ..arguments import check_fields, integer, shown
from ..kernels.blockwise.operators import Operators
from .base import MOST, Checked

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
            f"{name} takes a block of {BLOCKS[0]} to {BLOCKS[-1]} values, a power of two, not {shown(self.block)};"
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

    def _key(self, key: int) -> int | None:
        """Return the key of draws, if there are any, as a signed 64-bit integer, which the operator's argument is."""
        return (key + (1 << 63)) % (1 << 64) - (1 << 63) if getattr(self, "stochastic", False) else None
