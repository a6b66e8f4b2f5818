"""Formats that keep all places: blocks of values as a few bits each, headed by a few bytes, and casts to 16 bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, float32

from ..arguments import check_fields, describe, integer
from ..kernels import operators
from ..kernels.blockwise import float8
from ..kernels.blockwise.format import Format
from ..kernels.blockwise.uniform import GRIDS
from .base import Compressor

BLOCKS = tuple(1 << power for power in range(6, 14))


class Blockwise(Compressor):
    """A format in blocks: `block` values share a header; `stochastic` selects unbiased rounding.

    Unless `form` says otherwise, a value takes `bits`, and blocks are rotated first where `rotate` is true.
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
        """Return the key, signed and of 64 bits; None where nothing is drawn."""
        return (key + (1 << 63)) % (1 << 64) - (1 << 63) if self.stochastic else None

    # The same, beginning and ending to ask whether all that is read is finite.

    def _reduce_asking(self, packed: Tensor, n: int, residual: Tensor | None, key: int, ok: Tensor | None) -> Tensor:
        return operators.reduce(packed, self.form.name, n, self.block, residual, self._drawn(key), ok)

    def _decompress_answering(self, packed: Tensor, out: Tensor, ok: Tensor | None) -> None:
        operators.decompress_(out, self.form.name, packed, self.block, ok)


@dataclass(frozen=True, repr=False)
class Uniform(Blockwise):
    """So many bits a value: a block of values on an even grid of 2ᵇ levels of its own.

    The grid reaches from the block's minimum to its maximum and holds zero: the error is at most
    (max − min) / 2 (2ᵇ − 1), times 1.008 of fewer than eight bits. With `rotate=True` a block is first turned by a
    Hadamard transform with random signs, the same on all ranks: its values become nearly normal, whatever they were,
    and the error no longer follows the largest. It is then spread over all values of the block, zeros too. Of up to
    three bits, rotated, and of one bit always, the grid lies about zero with the step of least error for normal values.
    A block adds 4 bytes, of `bits=8` without rotation 8. Use fewer than eight bits with error feedback where gradients
    are averaged.

    Args:
        bits: of a value, 1 to 8.
        block: how many values a block has: a power of two, 64 to 8192.
        rotate: turn each block first, as above.
        stochastic: round up or down at random without bias, drawn from `key` and the position of the value: ranks that
            must draw differently need different keys.

    Raises:
        ValueError: `bits` or `block` is anything else.
    """

    bits: int = 4
    block: int = 256
    rotate: bool = True
    stochastic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("bits", self.bits, 1, 8)


@dataclass(frozen=True, repr=False)
class MinMaxUInt8(Blockwise):
    """Eight bits a value: a block of values on a grid of 256 levels, from its minimum to its maximum, that holds zero.

    The error is at most (max − min) / 510 of the block, plus a few ulps; zeros and blocks of equal values are exact. A
    block adds 8 bytes: 8.125 bits a value. The bytes of `Uniform(8, 512, rotate=False)`.

    `block` and `stochastic` are as in `Uniform`.
    """

    block: int = 512
    stochastic: bool = False

    bits: ClassVar[int] = 8  # type: ignore[misc]
    rotate: ClassVar[bool] = False  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class UInt4(Blockwise):
    """Four bits a value: `Uniform(4, rotate=False)`, 4.125 bits with the four bytes of a block.

    The error is at most (max − min) / 29.7 of the block, or, if that is less, the largest magnitude / 64995, plus a few
    ulps; zeros are exact. With `rotate=True` its square is about 1.2 % of that of the values, whatever their
    distribution. Use it with error feedback where gradients are averaged.

    `block`, `stochastic` and `rotate` are as in `Uniform`.
    """

    block: int = 256
    stochastic: bool = False
    rotate: bool = False

    bits: ClassVar[int] = 4  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class UInt2(Blockwise):
    """Two bits a value: `Uniform(2, 128)`, 2.25 bits with the four bytes of a block.

    The square of the error is about 12 % of that of the values, whatever their distribution: use it with error
    feedback.

    `block`, `stochastic` and `rotate` are as in `Uniform`.
    """

    block: int = 128
    stochastic: bool = False
    rotate: bool = True

    bits: ClassVar[int] = 2  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class Sign(Blockwise):
    """One bit a value: its sign, times the mean magnitude of the block. `Uniform(1, 1024, rotate=False)`.

    Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847.

    Of all that a block can be with one magnitude and these signs it is the nearest, and yet far: use it with error
    feedback, and with plain SGD or a smaller step, since momentum amplifies what returns. Zeros read as positive,
    unless their whole block is zero. A block adds 4 bytes: 1.03 bits a value.

    `block` is as in `Uniform`.
    """

    block: int = 1024

    bits: ClassVar[int] = 1  # type: ignore[misc]
    rotate: ClassVar[bool] = False  # type: ignore[misc]


FLOATS8 = {"e4m3": float8.E4M3, "e5m2": float8.E5M2}


@dataclass(frozen=True, repr=False)
class Float8(Blockwise):
    """Eight bits a value: a float8 number, scaled by a power of two that each block has of its own.

    Unlike MinMaxUInt8's, the error follows the value: in the `format` "e4m3" at most 1/16 of it and in "e5m2" 1/8, down
    to 2⁻¹⁴ (2⁻²⁹) of the block's largest magnitude, below which it is at most half of the least number. Of values that
    are spread evenly MinMaxUInt8 loses less; where small ones lie beside large ones, this. Zeros are exact. A block
    adds one byte: 8.0625 bits a value.

    Args:
        format: "e4m3", of more precision, or "e5m2", of more range.
        block, stochastic: as in `Uniform`.

    Raises:
        ValueError: there is no such block, or no such format.
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
    """Two bytes a value, by a cast that rounds to the nearest, ties to even."""

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

    Values beyond 65504 become infinite and are passed on as such, and so does their residual; BFloat16() keeps the
    range of fp32.
    """

    dtype = torch.float16
