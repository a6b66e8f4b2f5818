"""Sixteen bits a value."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import integer
from .base import MOST, Checked


class Cast(Checked):
    """Two bytes a value, by a cast that rounds to the nearest, ties to even."""

    dtype: ClassVar[torch.dtype]

    def row_bytes(self, n: int) -> int:
        return 2 * integer("n", n, 0, MOST)

    def _compress(self, x: Tensor, residual: Tensor | None, key: int) -> Tensor:
        sent = x.to(self.dtype, copy=True)
        if residual is not None:
            residual.copy_(x.float() - sent.float())
        return sent.view(torch.uint8)

    def _decompress_(self, out: Tensor, packed: Tensor) -> None:
        out.copy_(self._rows(packed))

    def _add_(self, out: Tensor, packed: Tensor, weights: Tensor) -> None:
        total = out.float()
        for row, weight in zip(self._rows(packed), weights, strict=True):
            total = total + row.float() * weight
        out.copy_(total)

    def _reduce(self, packed: Tensor, n: int, residual: Tensor | None, key: int) -> Tensor:
        total = torch.zeros(n, dtype=torch.float32, device=packed.device)
        for row in self._rows(packed):
            total += row
        mean = total / total.new_full((1,), len(packed))
        sent = mean.to(self.dtype)
        if residual is not None:
            residual += (mean - sent.float()) * len(packed)
        return sent.view(torch.uint8).unsqueeze(0)

    def _rows(self, packed: Tensor) -> Tensor:
        return packed.flatten().view(self.dtype).view(len(packed), -1)


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
