"""The compressors: blockwise formats of one to eight bits per value, casts to 16 bits, and the largest values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, float32

from ..arguments import Declared, Range, check_fields, integer
from ..kernels import operators, topk
from ..kernels.blockwise import float8
from ..kernels.blockwise.format import Format
from ..kernels.blockwise.uniform import GRIDS
from .base import MOST, PROBE, Compressor

Block = Annotated[int, Range(64, 8192, power_of_two=True)]


class Blockwise(Declared, Compressor):
    """A compressor in blocks of `block` values, each with a header; `stochastic` selects unbiased random rounding.

    Unless a subclass overrides `form`, a value takes `bits` bits, and with `rotate` blocks are rotated first.
    """

    block: int
    bits: int
    rotate: bool
    stochastic: bool = False

    @property
    def form(self) -> Format:
        """Return the wire format that packs and unpacks the blocks."""
        return GRIDS[self.bits, self.rotate]

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

    def _use_once(self, x: Tensor) -> None:
        super()._use_once(x)
        # The kernels that also find out whether a mean is finite.
        packed, drawn, ok = self.compress(x), self._drawn(0), x.new_empty((), dtype=torch.bool)
        for residual in (None, torch.zeros_like(x[0], dtype=float32)):
            mean = operators.reduce(packed, self.form.name, x.shape[1], self.block, residual, drawn, ok)
        operators.decompress_(x[:1], self.form.name, mean, self.block, ok)

    def _drawn(self, key: int) -> int | None:
        """Return the key as a signed 64-bit number; None if rounding is not random."""
        return (key + (1 << 63)) % (1 << 64) - (1 << 63) if self.stochastic else None


@dataclass(frozen=True, repr=False)
class Uniform(Blockwise):
    """One to eight bits per value: each block has a uniform grid of 2ᵇ levels, for b bits.

    The grid spans the block from its minimum to its maximum; levels are multiples of the step. Rounding to nearest has
    an error of at most (max − min) / (2 (2ᵇ − 1)). With fewer than eight bits it is 1.008 times as much, and more in
    narrow blocks far from zero. With `rotate=True`, a block is first multiplied by a Hadamard matrix with random signs,
    the same on all ranks. The values become nearly normal, and the error no longer depends on the largest value. The
    error is then spread over all values, zeros included. For up to three bits with rotation, and always for one bit,
    the grid is centred at zero, and its step has the least error for normal values. A block adds 4 bytes (8 bytes for
    `bits=8` without rotation). With fewer than eight bits, use error feedback when gradients are averaged.

    Args:
        bits: the number of bits per value, 1 to 8.
        block: the number of values per block: a power of two, 64 to 8192.
        rotate: whether each block is first multiplied by the Hadamard matrix.
        stochastic: round up or down at random without bias. The random number of a value depends on `key` and the
            position of the value only: give ranks different keys if they must round independently.

    Raises:
        ValueError: `bits` or `block` is out of range.
    """

    bits: Annotated[int, Range(1, 8)] = 4
    block: Block = 256
    rotate: bool = True
    stochastic: bool = False


@dataclass(frozen=True, repr=False)
class MinMaxUInt8(Blockwise):
    """Eight bits per value: a block has 256 levels from its minimum to its maximum, each a multiple of the step.

    The error is at most (max − min) / 510 of the block, or (max − min) / 254 with `stochastic`, plus a few ulps. Zeros
    and blocks of equal values are exact. A block adds 8 bytes: 8.125 bits a value. The packed bytes equal those of
    `Uniform(8, 512, rotate=False)`. `block` and `stochastic` are as in `Uniform`.
    """

    block: Block = 512
    stochastic: bool = False

    bits: ClassVar[int] = 8  # type: ignore[misc]
    rotate: ClassVar[bool] = False  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class UInt4(Blockwise):
    """Four bits per value x, as `Uniform(4, rotate=False)`. A block adds 4 bytes: 4.125 bits a value.

    The error is at most (max − min) / 29.7 or max |x| / 64995 of the block, whichever is larger, plus a few ulps. Zeros
    are exact. With `rotate=True`, the error's squared norm is about 1.2 % of ‖x‖², for any distribution of the values.
    Use error feedback when gradients are averaged.

    `block`, `stochastic` and `rotate` are as in `Uniform`.
    """

    block: Block = 256
    stochastic: bool = False
    rotate: bool = False

    bits: ClassVar[int] = 4  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class UInt2(Blockwise):
    """Two bits per value, as `Uniform(2, 128)`. A block adds 4 bytes: 2.25 bits a value.

    The error's squared norm is about 12 % of ‖x‖², for any distribution of the values x. Use error feedback.

    `block`, `stochastic` and `rotate` are as in `Uniform`.
    """

    block: Block = 128
    stochastic: bool = False
    rotate: bool = True

    bits: ClassVar[int] = 2  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class Sign(Blockwise):
    """One bit per value, its sign, times the mean magnitude of the block; as `Uniform(1, 1024, rotate=False)`.

    Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847.

    The mean magnitude is the best single magnitude, but the error is large. Use error feedback, and plain SGD or a
    smaller step, because momentum amplifies the error that is fed back. Zeros decode as positive values, unless the
    whole block is zero. A block adds 4 bytes: 1.03 bits a value.

    `block` is as in `Uniform`.
    """

    block: Block = 1024

    bits: ClassVar[int] = 1  # type: ignore[misc]
    rotate: ClassVar[bool] = False  # type: ignore[misc]


FLOATS8 = {"e4m3": float8.E4M3, "e5m2": float8.E5M2}


@dataclass(frozen=True, repr=False)
class Float8(Blockwise):
    """Eight bits per value: a float8 number, scaled by a power of two per block.

    The error is at most 1/16 of the value in the `format` "e4m3", and 1/8 in "e5m2", for values down to about 2⁻¹⁴
    (e5m2: 2⁻²⁹) of the block's largest magnitude. Smaller values have the absolute bound of the smallest of these.
    Rounding is to nearest; `stochastic` doubles the bounds. MinMaxUInt8 is more accurate for uniformly distributed
    values, and Float8 for a mix of small and large values. Zeros are exact. A block adds one byte: 8.0625 bits a value.

    Args:
        format: "e4m3" for more precision, or "e5m2" for more range.
        block, stochastic: as in `Uniform`.

    Raises:
        ValueError: `block` or `format` is invalid.
    """

    format: Literal["e4m3", "e5m2"] = "e4m3"
    block: Block = 128
    stochastic: bool = False

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


@dataclass(frozen=True, repr=False)
class BFloat16(Cast):
    """Sixteen bits a value: values are sent in bfloat16, and summed in fp32."""

    dtype = torch.bfloat16


@dataclass(frozen=True, repr=False)
class Float16(Cast):
    """Sixteen bits a value: values are sent in float16, and summed in fp32.

    Values of magnitude 65520 or more become infinite, and so does their residual. BFloat16() has the range of fp32.
    """

    dtype = torch.float16


@dataclass(frozen=True, repr=False)
class TopK(Compressor):
    """The values of largest magnitude, a share `ratio` of each chunk, with their positions in the chunk.

    A row is cut in chunks; the last chunk may be shorter. At least one value of each chunk is kept. Among equal
    magnitudes the first are kept, so the result depends on the values alone. A position takes log₂(chunk) bits, 12 by
    default. A value takes four bytes; or `values` compresses all kept values of a row together. The positions of a row
    are distinct, so adding rows gives the same result on every device. A value that is not finite counts as the largest
    and is passed on. The host never waits. Ranks keep different positions, so there is no `reduce`: use `SparseMean`.

    `TopK(0.0156, values=UInt2())` sends 14.25 bits for each value that it keeps.

    Args:
        ratio: the share of a chunk's values that are kept, in (0, 1].
        chunk: the number of values per chunk: a power of two, 64 to 4096.
        values: a dense compressor for the kept values; with None they are sent in fp32.
    """

    ratio: Annotated[float, Range(above=0, most=1)]
    chunk: Annotated[int, Range(64, 4096, power_of_two=True)] = 4096
    values: Compressor | None = None
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.values is not None and not self.values.dense:
            raise ValueError(
                f"values is how TopK compresses all values that it keeps, and {self.values!r} leaves some out; "
                "use a dense compressor such as UInt2()"
            )

    def kept(self, n: int) -> int:
        """Return how many values of a row of `n` values are kept."""
        whole, rest = divmod(integer("n", n, 0, MOST), self.chunk)
        return whole * self._kept_of(self.chunk) + self._kept_of(rest)

    def row_bytes(self, n: int) -> int:
        count, inner = self.kept(n), self.values
        return topk.values_at(count, self.chunk) + (4 * count if inner is None else inner._unchecked_row_bytes(count))

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        return self._compress_with_check(x, residual, key, None)

    def _compress_with_check(self, x: Tensor, residual: Tensor | None, key: int, ok: Tensor | None) -> Tensor:
        """Return packed rows, and set the bool `ok` to True. `_mean_of` sets it to False if the mean is not finite."""
        places, kept = operators.select(x, *self._counts(x.shape[1]), residual)
        packed = x.new_empty(len(x), self.row_bytes(x.shape[1]), dtype=torch.uint8)
        operators.join_(packed, places, kept if self.values is None else None, self.chunk, ok)
        if self.values is not None:
            lost = None if residual is None else torch.empty_like(kept)
            at = topk.values_at(kept.shape[1], self.chunk)
            packed[:, at:] = self.values._unchecked_compress(kept, lost, key)
            if residual is not None and lost is not None:
                residual.scatter_(1, topk.in_rows(places, *self._counts(0)[:2]), lost)
        return packed

    def decompress(self, packed: Tensor, n: int, dtype: torch.dtype = float32, out: Tensor | None = None) -> Tensor:
        count, k = self.kept(n), self._kept_of(self.chunk)
        values, index = topk.parts_of(packed, self._values(packed, count), count, self.chunk, k)
        out = packed.new_zeros(len(packed), n, dtype=dtype) if out is None else out.zero_()
        return out.scatter_(1, index, values.to(out.dtype))

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        values, weights = self._values(packed, self.kept(len(out))), torch.as_tensor(weights)
        operators.add_rows_(out, packed, values, weights, *self._counts(len(out)), None)
        return out

    def _mean_of(self, packed: Tensor, out: Tensor, ok: Tensor | None = None) -> None:
        values = self._values(packed, self.kept(len(out)))
        operators.add_rows_(out, packed, values, None, *self._counts(len(out)), ok)

    def warm_up(self, device: torch.device | str, dtype: torch.dtype = float32, values: int = PROBE) -> None:
        super().warm_up(device, dtype, values)
        if self.values is not None:
            self.values.warm_up(device, float32, self.kept(values))

    def _use_once(self, x: Tensor) -> None:
        x, ok = x[:1], x.new_empty((), dtype=torch.bool)
        self.compress(x, torch.empty_like(x, dtype=float32))
        packed = self._compress_with_check(x, None, 0, ok)
        self.add_(x[0], packed, [1.0])
        self._mean_of(packed, x[0], ok)

    def _kept_of(self, length: int) -> int:
        return min(length, max(1, round(self.ratio * length)))

    def _counts(self, n: int) -> tuple[int, int, int]:
        """Return (chunk length, kept values per chunk, kept values in a shorter last chunk) for a row of `n` values."""
        return self.chunk, self._kept_of(self.chunk), self._kept_of(n % self.chunk)

    def _values(self, packed: Tensor, count: int) -> Tensor | None:
        """Return the values of packed rows in fp32; None if the rows hold fp32 values already, or no values."""
        if self.values is None or count == 0:
            return None
        sent = packed[:, topk.values_at(count, self.chunk) :].contiguous()
        return self.values._unchecked_decompress(sent, count, float32, None)
