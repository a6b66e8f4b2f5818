"""Sixteen bits a value."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import integer
from .base import MOST, Compressor, check_rows, output_for, packed_of, residual_of, sum_into, values_of, weights_of


class Cast(Compressor):
    """Two bytes a value, by a cast that rounds to the nearest, ties to even."""

    dtype: ClassVar[torch.dtype]

    def row_bytes(self, n: int) -> int:
        return 2 * integer("n", n, 0, MOST)

    @torch.no_grad()
    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        x = values_of(x, key)
        sent = x.to(self.dtype, copy=True)
        if (lost := residual_of(residual, x.shape, x)) is not None:
            lost.copy_(x.float() - sent.float())
        return sent.view(torch.uint8)

    @torch.no_grad()
    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        rows = self._rows(packed, n)
        return output_for(out, packed, n, dtype).copy_(rows)

    @torch.no_grad()
    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        rows = self._rows(packed, sum_into(out, packed).shape[0])
        total = out.float()
        for row, weight in zip(rows, weights_of(weights, packed), strict=True):
            total = total + row.float() * weight
        return out.copy_(total)

    @torch.no_grad()
    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        rows = self._rows(packed, n)
        check_rows(packed, key)
        total = torch.zeros(n, dtype=torch.float32, device=packed.device)
        for row in rows:
            total += row
        mean = total / total.new_full((1,), len(rows))
        sent = mean.to(self.dtype)
        if (lost := residual_of(residual, (n,), packed)) is not None:
            lost += (mean - sent.float()) * len(rows)
        return sent.view(torch.uint8).unsqueeze(0)

    def _rows(self, packed: Tensor, n: int) -> Tensor:
        return packed_of(packed, self, n).flatten().view(self.dtype).view(len(packed), n)


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
