"""Sixteen bits a value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, float32

from .base import Compressor


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
