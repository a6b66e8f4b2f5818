"""Blocks of values, each value as a few bits and each block headed by a few bytes."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import check_fields, shown, whole
from ..kernels.blockwise.operators import Operators
from .base import MOST, Compressor, check_rows, packed_of, residual_of, room_for, sum_into, values_of, weights_of

BLOCKS = tuple(1 << power for power in range(6, 14))


class Blockwise(Compressor):
    """A frozen dataclass of a format, the length of its blocks, and, as `stochastic`, whether rounding is drawn.

    Attributes:
        whole: a row may be one block, by `block=None`.
    """

    block: int | None
    whole: ClassVar[bool] = False

    @property
    def operators(self) -> Operators:
        """The operations of the format."""
        raise NotImplementedError

    @property
    def drawn(self) -> bool:
        """Whether rounding is drawn."""
        return getattr(self, "stochastic", False)

    def __post_init__(self) -> None:
        if self.block in BLOCKS if isinstance(self.block, int) else self.block is None and self.whole:
            return check_fields(self)
        name, usual = type(self).__name__, type(self).block
        other = f", and {name}(block=None) one block a row" if self.whole else ""
        raise ValueError(
            f"{name} takes a block of {BLOCKS[0]} to {BLOCKS[-1]} values, a power of two, not {shown(self.block)};"
            f" {name}() takes {usual}{other}"
        )

    def row_bytes(self, n: int) -> int:
        whole("n", n, 0, MOST)
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
        out = room_for(out, packed, n, dtype)
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

    def _key(self, key: int) -> int | None:
        # Any integer is a key; the operator's argument is a signed 64-bit one.
        return (key + (1 << 63)) % (1 << 64) - (1 << 63) if self.drawn else None
