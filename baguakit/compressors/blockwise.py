"""Blocks of values, each value as a few bits and each block headed by a few bytes."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import check_fields, describe
from ..kernels import operators
from ..kernels.blockwise.format import Format
from .base import Compressor

BLOCKS = tuple(1 << power for power in range(6, 14))


class Blockwise(Compressor):
    """A format in blocks: `block` values share a header; `stochastic` selects unbiased rounding."""

    block: int
    stochastic: bool = False

    @property
    def form(self) -> Format:
        """Return the format on the wire."""
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
        return self.form.row_bytes(n, self.block)

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        drawn = signed(key) if self.stochastic else None
        return operators.compress(x, self.form.name, self.block, residual, drawn)

    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(len(packed), n, dtype=dtype, device=packed.device) if out is None else out
        operators.decompress_(out, self.form.name, packed, self.block)
        return out

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        operators.add_(out, self.form.name, packed, weights, self.block)
        return out

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        drawn = signed(key) if self.stochastic else None
        return operators.reduce(packed, self.form.name, n, self.block, residual, drawn)


def signed(key: int) -> int:
    """Return any integer as a signed 64-bit one, which the operator's argument is."""
    return (key + (1 << 63)) % (1 << 64) - (1 << 63)
