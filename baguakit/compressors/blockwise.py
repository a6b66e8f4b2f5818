"""Dense formats: blocks with a few bits per value and a header of a few bytes per block, and casts to 16 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor, float32

from ..arguments import Range, check_fields, describe
from ..kernels import operators
from ..kernels.blockwise import float8
from ..kernels.blockwise.format import Format
from ..kernels.blockwise.uniform import GRIDS
from .base import Compressor

BLOCKS = tuple(1 << power for power in range(6, 14))


class Blockwise(Compressor):
    """A format in blocks: `block` values share a header; `stochastic` selects unbiased rounding.

    Unless a subclass overrides `form`, a value takes `bits` bits, and `rotate` selects rotation of blocks first.
    """

    block: int
    bits: int
    rotate: bool
    stochastic: bool = False

    @property
    def form(self) -> Format:
        """Return the format on the wire."""
        return GRIDS[self.bits, self.rotate]

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
        return operators.compress(x, self.form.name, self.block, residual, self._drawn(key))

    def decompress(self, packed: Tensor, n: int, dtype: torch.dtype = float32, out: Tensor | None = None) -> Tensor:
        out = torch.empty(len(packed), n, dtype=dtype, device=packed.device) if out is None else out
        operators.decompress_(out, self.form.name, packed, self.block, None)
        return out

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        operators.add_(out, self.form.name, packed, weights, self.block)
        return out

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        return operators.reduce(packed, self.form.name, n, self.block, residual, self._drawn(key), None)

    def _drawn(self, key: int) -> int | None:
        """Return the key as a signed 64-bit number; None if rounding is not random."""
        return (key + (1 << 63)) % (1 << 64) - (1 << 63) if self.stochastic else None

    # Like `reduce` and `decompress`. The first sets `ok` to True; the second to False if a value is not finite.

    def _reduce_with_check(
        self, packed: Tensor, n: int, residual: Tensor | None, key: int, ok: Tensor | None
    ) -> Tensor:
        return operators.reduce(packed, self.form.name, n, self.block, residual, self._drawn(key), ok)

    def _decompress_with_check(self, packed: Tensor, out: Tensor, ok: Tensor | None) -> None:
        operators.decompress_(out, self.form.name, packed, self.block, ok)


@dataclass(frozen=True, repr=False)
class Uniform(Blockwise):
    """One to eight bits per value: each block has a uniform grid of 2ᵇ levels, for b bits.

    The grid spans the block's minimum to its maximum; levels are multiples of the step. With rounding to nearest, the
    error is at most (max − min) / 2 (2ᵇ − 1), times 1.008 for fewer than eight bits. With `rotate=True`, a block is
    first multiplied by a Hadamard matrix with random signs, the same on all ranks. Its values become nearly normal, and
    the error no longer depends on the largest value. The error is then spread over all values of the block, zeros too.
    For up to three bits with rotation, and always for one bit, the grid is centred at zero, with the step of least
    error for normal values. A block adds 4 bytes (8 bytes for `bits=8` without rotation). With fewer than eight bits,
    use error feedback when gradients are averaged.

    Args:
        bits: the number of bits per value, 1 to 8.
        block: the number of values per block: a power of two, 64 to 8192.
        rotate: rotate each block first, as above.
        stochastic: round up or down at random without bias, drawn from `key` and the position of the value. Ranks that
            must draw different numbers need different keys.

    Raises:
        ValueError: `bits` or `block` is out of range.
    """

    bits: Annotated[int, Range(1, 8)] = 4
    block: int = 256
    rotate: bool = True
    stochastic: bool = False


@dataclass(frozen=True, repr=False)
class MinMaxUInt8(Blockwise):
    """Eight bits per value: a block has 256 levels from its minimum to its maximum, each a multiple of the step.

    The error is at most (max − min) / 510 of the block, or with `stochastic` / 254, plus a few ulps. Zeros and blocks
    of equal values are exact. A block adds 8 bytes: 8.125 bits a value. Bytes equal `Uniform(8, 512, rotate=False)`.

    `block` and `stochastic` are as in `Uniform`.
    """

    block: int = 512
    stochastic: bool = False

    bits: ClassVar[int] = 8  # type: ignore[misc]
    rotate: ClassVar[bool] = False  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class UInt4(Blockwise):
    """Four bits per value: `Uniform(4, rotate=False)`; 4.125 bits with the four bytes of a block.

    The error is at most (max − min) / 29.7 of the block, or, if that is less, the largest magnitude / 64995, plus a few
    ulps; zeros are exact. With `rotate=True`, ‖Q(x) − x‖² is about 1.2 % of ‖x‖² for any distribution of the values.
    Use it with error feedback when gradients are averaged.

    `block`, `stochastic` and `rotate` are as in `Uniform`.
    """

    block: int = 256
    stochastic: bool = False
    rotate: bool = False

    bits: ClassVar[int] = 4  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class UInt2(Blockwise):
    """Two bits per value: `Uniform(2, 128)`; 2.25 bits with the four bytes of a block.

    ‖Q(x) − x‖² is about 12 % of ‖x‖² for any distribution of the values. Use it with error feedback.

    `block`, `stochastic` and `rotate` are as in `Uniform`.
    """

    block: int = 128
    stochastic: bool = False
    rotate: bool = True

    bits: ClassVar[int] = 2  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class Sign(Blockwise):
    """One bit per value: its sign, times the mean magnitude of the block. `Uniform(1, 1024, rotate=False)`.

    Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847.

    The mean is the best magnitude for these signs, but the error is large. Use it with error feedback, and with plain
    SGD or a smaller step, because momentum amplifies the returning error. Zeros decode as positive values, unless the
    whole block is zero. A block adds 4 bytes: 1.03 bits a value.

    `block` is as in `Uniform`.
    """

    block: int = 1024

    bits: ClassVar[int] = 1  # type: ignore[misc]
    rotate: ClassVar[bool] = False  # type: ignore[misc]


FLOATS8 = {"e4m3": float8.E4M3, "e5m2": float8.E5M2}


@dataclass(frozen=True, repr=False)
class Float8(Blockwise):
    """Eight bits per value: a float8 number, scaled by a power of two per block.

    The error is relative to the value: at most 1/16 of it in the `format` "e4m3", and 1/8 in "e5m2". This holds for
    values down to 2⁻¹⁴ (2⁻²⁹) of the block's largest magnitude; below, the error is at most half of the smallest
    number. MinMaxUInt8 has a smaller error for uniformly distributed values; Float8 for a mix of small and large
    values. Zeros are exact. A block adds one byte: 8.0625 bits a value.

    Args:
        format: "e4m3" for more precision, or "e5m2" for more range.
        block, stochastic: as in `Uniform`.

    Raises:
        ValueError: `block` or `format` is invalid.
    """

    format: str = "e4m3"
    block: int = 128
    stochastic: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, str) or self.format not in FLOATS8:
            raise ValueError(
                f'format of Float8 is "e4m3", with more precision, or "e5m2", with more range, not '
                f"{describe(self.format)}; Float8() takes {type(self).format!r}"
            )
        super().__post_init__()

    @property
    def form(self) -> Format:
        return FLOATS8[self.format]


class Cast(Compressor):
    """Two bytes per value: a cast that rounds to nearest, ties to even."""

    dtype: ClassVar[torch.dtype]

    def row_bytes(self, n: int) -> int:
        return 2 * n

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        sent = x.to(self.dtype, copy=True)
        if residual is not None:
            residual.copy_(x.float() - sent.float())
        return sent.view(torch.uint8)

    def decompress(self, packed: Tensor, n: int, dtype: torch.dtype = float32, out: Tensor | None = None) -> Tensor:
        rows = packed.view(self.dtype)
        return rows.to(dtype, copy=True) if out is None else out.copy_(rows)

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        total = out.float()
        for row, weight in zip(packed.view(self.dtype), weights, strict=True):
            total = total + row.float() * weight
        return out.copy_(total)

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        total = torch.zeros(n, dtype=float32, device=packed.device)
        for row in packed.view(self.dtype):
            total += row
        mean = total / total.new_full((1,), len(packed))
        sent = mean.to(self.dtype)
        if residual is not None:
            residual += (mean - sent.float()) * len(packed)
        return sent.view(torch.uint8).unsqueeze(0)


@dataclass(frozen=True, repr=False)
class BFloat16(Cast):
    """Sixteen bits a value: bfloat16 on the wire, sums in fp32."""

    dtype = torch.bfloat16


@dataclass(frozen=True, repr=False)
class Float16(Cast):
    """Sixteen bits a value: float16 on the wire, sums in fp32.

    Values of magnitude 65520 or more become infinite, and so does their residual. BFloat16() has the range of fp32.
    """

    dtype = torch.float16
