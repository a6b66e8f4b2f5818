"""Eight bits a value."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels import minmax_uint8, minmax_uint8_ops
from .base import Compressor, packed_of, residual_of, room_for, sum_into, values_of, weights_of

BLOCKS = tuple(1 << power for power in range(6, 14))


@dataclass(frozen=True, repr=False)
class MinMaxUInt8(Compressor):
    """Eight bits a value: a block of values on a grid of 256 levels, from its minimum to its maximum, that holds zero.

    The error is at most (max − min) / 510 of the block, plus a few ulps; zeros and blocks of equal values are exact. A
    block adds 8 bytes. `block=None` makes each row one block, as Bagua does: one outlier then coarsens the whole row.
    With `stochastic=True` values are rounded up or down at random without bias, drawn from `key` and the position of
    the value: ranks that must draw differently need different keys.
    """

    block: int | None = 512
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.block is not None and self.block not in BLOCKS:
            raise ValueError(
                f"MinMaxUInt8 takes a block of {BLOCKS[0]} to {BLOCKS[-1]} values, a power of two, not {self.block!r};"
                f" MinMaxUInt8() takes {MinMaxUInt8.block}, and MinMaxUInt8(block=None) one block a row"
            )

    def row_bytes(self, n: int) -> int:
        return minmax_uint8.row_bytes(n, self.block)

    @torch.no_grad()
    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        x = values_of(x)
        packed: Tensor = minmax_uint8_ops.compress(x, self.block, residual_of(residual, x.shape), self._key(key))
        return packed

    @torch.no_grad()
    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        packed = packed_of(packed, self, n)
        out = room_for(out, packed, n, dtype)
        minmax_uint8_ops.decompress_(out, packed, self.block)
        return out

    @torch.no_grad()
    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        packed = packed_of(packed, self, sum_into(out).shape[0])
        minmax_uint8_ops.add_(out.detach(), packed, weights_of(weights, packed), self.block)
        return out

    @torch.no_grad()
    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        packed = packed_of(packed, self, n)
        sent: Tensor = minmax_uint8_ops.reduce(packed, n, self.block, residual_of(residual, (n,)), self._key(key))
        return sent

    def _key(self, key: int) -> int | None:
        # Any integer is a key; the operator's argument is a signed 64-bit one.
        return (key + (1 << 63)) % (1 << 64) - (1 << 63) if self.stochastic else None
