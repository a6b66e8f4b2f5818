"""Compressors: how a tensor looks on the wire.

A compressor turns rows of values into rows of bytes: one row for each rank that a tensor is cut up for, or that it came from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .kernels import minmax_uint8

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PROBE = 1 << 16  # values of a row, and five rows: enough for every compiled path


class Compressor:
    """Rows (rows, n) of floating-point values as rows of bytes (rows, row_bytes(n)), in one contiguous uint8 tensor.

    All arithmetic is fp32, whatever the dtype of the values. A NaN or an infinity is passed on: what it touches reads as not finite.
    """

    def row_bytes(self, n: int) -> int:
        """How many bytes a row of `n` values takes."""
        raise NotImplementedError

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        """Return the packed rows of `x` (rows, n).

        `residual` (fp32, shape of `x`) receives the loss, `x − decompressed` rounded to fp32: where that difference is a number of fp32, as it is
        for all but values much smaller than the error, `x == decompressed + residual` exactly. `key` chooses the random draws of compressors that make any.
        """
        raise NotImplementedError

    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        """Return the values (rows, n) of packed rows, written into `out` if given."""
        raise NotImplementedError

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        """Add to `out` (n,) the values of each row times its weight, row after row, summed in fp32."""
        raise NotImplementedError

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        """Return the mean of the packed rows as one packed row: summed in their order in fp32, divided by their number, compressed again.

        To `residual` (fp32, (n,)) is added the number of rows times the loss of this second compression, which is what the sum of the rows lost.
        """
        raise NotImplementedError

    def warm_up(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
        """Compile now what the first step would otherwise compile, for values of `dtype` on `device`."""
        x = torch.zeros(5, PROBE, dtype=dtype, device=device)
        residual = torch.zeros_like(x, dtype=torch.float32)
        packed = self.compress(x, residual)
        self.compress(x[:1])
        self.decompress(packed, PROBE, dtype, out=x)
        self.add_(x[0], packed, [0.2] * 5)
        self.reduce(packed, PROBE, residual[0])

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class MinMaxUInt8(Compressor):
    """Eight bits a value: each block of `block` values on a grid of 256 levels between its minimum and maximum that holds zero.

    The error is at most (max − min) / 510 of the block, plus a few ulps; zeros and blocks of equal values are exact. 8 bytes a block are added for its
    grid. `block=None` makes each row one block, as Bagua does: one outlier then coarsens the whole row. With `stochastic=True` values are rounded up
    or down at random without bias, by draws of `key` and the value's position: ranks that must draw differently need different keys.
    """

    block: int | None = 512
    stochastic: bool = False

    def __post_init__(self) -> None:
        if self.block is not None and not (
            isinstance(self.block, int) and 64 <= self.block <= 8192 and self.block & (self.block - 1) == 0
        ):
            raise ValueError(
                f"MinMaxUInt8 takes blocks of 64, 128, … 8192 values, or None for one block a row, not {self.block!r}; use MinMaxUInt8(block=512)"
            )

    def row_bytes(self, n: int) -> int:
        return minmax_uint8.row_bytes(n, self.block)

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        x = _values(x)
        with torch.no_grad():
            return minmax_uint8.compress(x, self.block, _residual(residual, x.shape), self._key(key))

    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        packed = _packed(packed, self, n)
        out = _out(out, packed, n, dtype)
        with torch.no_grad():
            minmax_uint8.decompress_(out, packed, self.block)
        return out

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        packed = _packed(packed, self, _sum(out).shape[0])
        with torch.no_grad():
            minmax_uint8.add_(out, packed, _weights(weights, packed), self.block)
        return out

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        packed = _packed(packed, self, n)
        with torch.no_grad():
            return minmax_uint8.reduce(packed, n, self.block, _residual(residual, (n,)), self._key(key))

    def _key(self, key: int) -> int | None:
        # Any integer is a key; the operator's argument is a signed 64-bit one.
        return (key + (1 << 63)) % (1 << 64) - (1 << 63) if self.stochastic else None


class _Cast(Compressor):
    """Two bytes a value, by a cast that rounds to the nearest, ties to even."""

    dtype: torch.dtype

    def row_bytes(self, n: int) -> int:
        return 2 * n

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        x, sent = _values(x), _values(x).to(self.dtype)
        if _residual(residual, x.shape) is not None:
            residual.copy_(x.float() - sent.float())  # type: ignore[union-attr]
        return (sent.clone() if sent is x else sent).view(torch.uint8)

    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        packed = _packed(packed, self, n)
        return _out(out, packed, n, dtype).copy_(packed.view(self.dtype))

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        rows = _packed(packed, self, _sum(out).shape[0]).view(self.dtype)
        factors = _weights(weights, packed)
        total = out.float()
        for row, factor in zip(rows, factors):
            total = total + row.float() * factor
        return out.copy_(total)

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        values = _packed(packed, self, n).view(self.dtype)
        total = torch.zeros(n, device=packed.device)
        for row in values:
            total += row
        mean = total / total.new_full((1,), len(values))
        sent = mean.to(self.dtype)
        if _residual(residual, (n,)) is not None:
            residual.add_((mean - sent.float()) * len(values))  # type: ignore[union-attr]
        return sent.view(torch.uint8).unsqueeze(0)


@dataclass(frozen=True, repr=False)
class BFloat16(_Cast):
    """Sixteen bits a value: bfloat16 on the wire, sums in fp32."""

    dtype = torch.bfloat16


@dataclass(frozen=True, repr=False)
class Float16(_Cast):
    """Sixteen bits a value: float16 on the wire, sums in fp32.

    Values beyond 65504 become infinite and are passed on as such, and so does their residual; BFloat16() keeps the range of fp32.
    """

    dtype = torch.float16


def _values(x: Tensor) -> Tensor:
    if x.dtype not in FLOATS:
        raise TypeError(
            f"compressors take float32, bfloat16, float16 or float64 values, not {x.dtype}; convert them first"
        )
    if x.dim() != 2:
        raise ValueError(
            f"compressors take rows of values, shape (rows, n), not {tuple(x.shape)}; use x.view(rows, -1)"
        )
    return x.detach().contiguous()


def _packed(packed: Tensor, compressor: Compressor, n: int) -> Tensor:
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed rows are uint8, as compress returned them, not {packed.dtype}")
    if packed.dim() != 2 or packed.shape[1] != compressor.row_bytes(n):
        raise ValueError(
            f"{compressor!r} packs {n} values in rows of {compressor.row_bytes(n)} bytes; these have shape {tuple(packed.shape)}"
        )
    return packed.contiguous()


def _out(out: Tensor | None, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    if out is None:
        out = torch.empty(packed.shape[0], n, dtype=dtype, device=packed.device)
    if out.dtype not in FLOATS:
        raise TypeError(
            f"values are float32, bfloat16, float16 or float64, not {out.dtype}; decompress to one of them and convert"
        )
    if out.shape != (packed.shape[0], n) or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous and of shape {(packed.shape[0], n)}, one row for each packed one, not {tuple(out.shape)}"
        )
    return out.detach()


def _sum(out: Tensor) -> Tensor:
    if out.dtype not in FLOATS:
        raise TypeError(f"rows are added to float32, bfloat16, float16 or float64 values, not {out.dtype}")
    if out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"rows are added to one contiguous row, shape (n,), not {tuple(out.shape)}; use out.view(-1)")
    return out


def _weights(weights: Sequence[float] | Tensor, packed: Tensor) -> Tensor:
    weights = torch.as_tensor(weights, dtype=torch.float32, device=packed.device)
    if weights.shape != (packed.shape[0],):
        raise ValueError(f"{packed.shape[0]} packed rows need as many weights, not {tuple(weights.shape)}")
    return weights


def _residual(residual: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    if residual is None:
        return None
    if residual.dtype != torch.float32:
        raise TypeError(
            f"a residual is float32 whatever the values are, since less would lose it again, not {residual.dtype}"
        )
    if residual.shape != torch.Size(shape) or not residual.is_contiguous():
        raise ValueError(
            f"a residual is contiguous and has the shape of what it belongs to, {tuple(shape)}, not {tuple(residual.shape)}"
        )
    return residual
