"""Compressors: how a tensor looks on the wire.

A compressor turns rows of values into rows of bytes: a row for each rank that a tensor is cut up for, or came from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from .kernels import minmax_uint8, minmax_uint8_ops

BLOCKS = tuple(1 << power for power in range(6, 14))
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PROBE = (1 << 16) + 16  # values in each of five rows: enough for every compiled path, of whole blocks and of a rest


class Compressor:
    """Rows (rows, n) of floating-point values as rows of bytes (rows, row_bytes(n)), in one contiguous uint8 tensor.

    All arithmetic is fp32, whatever the dtype of the values. A NaN or an infinity is passed on: what it touches reads
    as not finite.
    """

    def row_bytes(self, n: int) -> int:
        """How many bytes a row of `n` values takes."""
        raise NotImplementedError

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        """Return the packed rows of `x` (rows, n).

        `residual` (fp32, shape of `x`) receives the loss, the difference of `x` and what decompresses, rounded to
        fp32. Where that rounding is exact, as it is for all but values far smaller than the error, `x` equals sent plus
        residual bit for bit. `key` chooses the draws of compressors that make any.
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
        """Return the mean of the packed rows, summed in their order in fp32 and compressed again, as one packed row.

        To `residual` (fp32, (n,)) is added the number of rows times the loss of this second compression.
        """
        raise NotImplementedError

    def warm_up(self, device: torch.device | str, dtype: torch.dtype = torch.float32, values: int = PROBE) -> None:
        """Compile now what the first step would otherwise compile, for tensors of so many values on a device.

        On a CPU nothing is compiled for fewer values than it would pay for.
        """
        if torch.device(device).type == "cpu" and values < PROBE:
            return
        x = torch.zeros(5, PROBE, dtype=dtype, device=device)
        residual = torch.zeros_like(x, dtype=torch.float32)
        packed = self.compress(x, residual)
        self.compress(x[:1])
        self.decompress(packed, PROBE, dtype, out=x)
        self.add_(x[0], packed, [0.2] * 5)
        self.reduce(packed, PROBE, residual[0])
        self.reduce(packed, PROBE)

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in values.items())})"


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
        x = _values(x)
        packed: Tensor = minmax_uint8_ops.compress(x, self.block, _residual(residual, x.shape), self._key(key))
        return packed

    @torch.no_grad()
    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        packed = _packed(packed, self, n)
        out = _out(out, packed, n, dtype)
        minmax_uint8_ops.decompress_(out, packed, self.block)
        return out

    @torch.no_grad()
    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        packed = _packed(packed, self, _sum(out).shape[0])
        minmax_uint8_ops.add_(out.detach(), packed, _weights(weights, packed), self.block)
        return out

    @torch.no_grad()
    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        packed = _packed(packed, self, n)
        sent: Tensor = minmax_uint8_ops.reduce(packed, n, self.block, _residual(residual, (n,)), self._key(key))
        return sent

    def _key(self, key: int) -> int | None:
        # Any integer is a key; the operator's argument is a signed 64-bit one.
        return (key + (1 << 63)) % (1 << 64) - (1 << 63) if self.stochastic else None


class _Cast(Compressor):
    """Two bytes a value, by a cast that rounds to the nearest, ties to even."""

    dtype: ClassVar[torch.dtype]

    def row_bytes(self, n: int) -> int:
        return 2 * n

    @torch.no_grad()
    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        x = _values(x)
        sent = x.to(self.dtype, copy=True)
        if (lost := _residual(residual, x.shape)) is not None:
            lost.copy_(x.float() - sent.float())
        return sent.view(torch.uint8)

    @torch.no_grad()
    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        packed = _packed(packed, self, n)
        return _out(out, packed, n, dtype).copy_(packed.view(self.dtype))

    @torch.no_grad()
    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        rows = _packed(packed, self, _sum(out).shape[0]).view(self.dtype)
        total = out.float()
        for row, weight in zip(rows, _weights(weights, packed), strict=True):
            total = total + row.float() * weight
        return out.copy_(total)

    @torch.no_grad()
    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        rows = _packed(packed, self, n).view(self.dtype)
        total = torch.zeros(n, device=packed.device)
        for row in rows:
            total += row
        mean = total / total.new_full((1,), len(rows))
        sent = mean.to(self.dtype)
        if (lost := _residual(residual, (n,))) is not None:
            lost += (mean - sent.float()) * len(rows)
        return sent.view(torch.uint8).unsqueeze(0)


@dataclass(frozen=True, repr=False)
class BFloat16(_Cast):
    """Sixteen bits a value: bfloat16 on the wire, sums in fp32."""

    dtype = torch.bfloat16


@dataclass(frozen=True, repr=False)
class Float16(_Cast):
    """Sixteen bits a value: float16 on the wire, sums in fp32.

    Values beyond 65504 become infinite and are passed on as such, and so does their residual; BFloat16() keeps the
    range of fp32.
    """

    dtype = torch.float16


def _values(x: Tensor) -> Tensor:
    _check_dtype(x.dtype)
    if x.dim() != 2:
        raise ValueError(f"values come in rows, of shape (rows, n), not {tuple(x.shape)}; use x.view(rows, -1)")
    return x.detach().contiguous()


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise TypeError(f"values are float32, bfloat16, float16 or float64, not {dtype}; convert them with .float()")


def _packed(packed: Tensor, compressor: Compressor, n: int) -> Tensor:
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed rows are uint8, as compress returned them, not {packed.dtype}")
    size = compressor.row_bytes(n)
    if packed.dim() != 2 or packed.shape[1] != size:
        raise ValueError(f"{compressor!r} packs {n} values in rows of {size} bytes, not {tuple(packed.shape)}")
    return packed.contiguous()


def _out(out: Tensor | None, packed: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    if out is None:
        out = torch.empty(packed.shape[0], n, dtype=dtype, device=packed.device)
    _check_dtype(out.dtype)
    if out.shape != (packed.shape[0], n) or not out.is_contiguous():
        raise ValueError(f"out is contiguous, of shape {(packed.shape[0], n)}, not {_describe(out)}")
    return out.detach()


def _sum(out: Tensor) -> Tensor:
    _check_dtype(out.dtype)
    if out.dim() != 1 or not out.is_contiguous():
        raise ValueError(f"rows are added to one contiguous row, of shape (n,), not {_describe(out)}; use out.view(-1)")
    return out


def _weights(weights: Sequence[float] | Tensor, packed: Tensor) -> Tensor:
    weights = torch.as_tensor(weights, dtype=torch.float32, device=packed.device).contiguous()
    if weights.shape != (packed.shape[0],):
        raise ValueError(f"{packed.shape[0]} packed rows need as many weights, not {tuple(weights.shape)}")
    return weights


def _residual(residual: Tensor | None, shape: Sequence[int]) -> Tensor | None:
    if residual is None:
        return None
    if residual.dtype != torch.float32:
        raise TypeError(
            f"a residual is float32 whatever the values are, not {residual.dtype}, which would lose it again"
        )
    if residual.shape != torch.Size(shape) or not residual.is_contiguous():
        raise ValueError(f"a residual is contiguous, here of shape {tuple(shape)}, not {_describe(residual)}")
    return residual.detach()


def _describe(x: Tensor) -> str:
    return f"{tuple(x.shape)}{'' if x.is_contiguous() else ' with gaps'}"
