"""The largest values, each with its index."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import integer, real
from ..kernels.topk import operators as topk_ops
from .base import MOST, PROBE, Compressor, output_for, packed_of, residual_of, sum_into, values_of, warmed, weights_of


@dataclass(frozen=True, repr=False)
class TopK(Compressor):
    """The `ratio` of a row that is largest in magnitude: four bytes for a value, in fp32, and four for its index.

    At least one value of a row is kept, and of equal ones the first: what is sent depends on the values alone. Indices
    rise, and none occurs twice, so that rows can be added in any device's own way and yet with the same result. What
    is not finite counts as largest and is passed on. Nothing waits for a GPU. Ranks keep different places, so there is
    no `reduce`: use it in `SparseMean`.

    Args:
        ratio: the share of the values of a row that is kept, in (0, 1].

    Raises:
        ValueError: `ratio` is anything else; or, from `compress`, a row has 2³¹ values or more.
    """

    ratio: float
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", real("ratio", self.ratio, most=1, above=0))

    def kept(self, n: int) -> int:
        """Return how many values of a row of `n` are kept."""
        return min(integer("n", n, 0, MOST), max(1, round(self.ratio * n)))

    def row_bytes(self, n: int) -> int:
        return 8 * self.kept(n)

    @torch.no_grad()
    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        x = values_of(x, key)
        if x.shape[1] > torch.iinfo(torch.int32).max:
            raise ValueError(f"TopK counts places in 32 bits, and a row of {x.shape[1]} values is longer; cut it up")
        packed: Tensor = topk_ops.compress(x, self.kept(x.shape[1]), residual_of(residual, x.shape, x))
        return packed

    @torch.no_grad()
    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        packed = packed_of(packed, self, n)
        values, index = self._parts(packed, n)
        out = output_for(out, packed, n, dtype)
        return out.zero_().scatter_(1, index.long(), values.to(out.dtype))

    @torch.no_grad()
    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        packed = packed_of(packed, self, sum_into(out, packed).numel())
        wide = torch.promote_types(out.dtype, torch.float32)
        total = out.to(wide)
        for values, index, weight in zip(*self._parts(packed, out.numel()), weights_of(weights, packed), strict=True):
            part = (values * weight).to(wide)
            if total.is_cpu:
                total.index_add_(0, index, part)
            else:  # the atomic sums of GPUs take subnormal numbers for zeros
                places = index.long()
                total[places] = total[places] + part
        return out if total is out else out.copy_(total)

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        raise TypeError(f"{self!r} keeps other places of each rank's values; average them with SparseMean({self!r})")

    def warm_up(self, device: torch.device | str, dtype: torch.dtype = torch.float32, values: int = PROBE) -> None:
        """Compile before the first step all that it needs on a GPU, for a row of so many values."""
        if warmed(device, dtype, values) != "cpu" and values:
            x = torch.zeros(1, values, dtype=dtype, device=device)
            self.compress(x, torch.empty_like(x, dtype=torch.float32))
            self.compress(x)

    def _parts(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        words = packed.flatten().view(torch.int32).view(len(packed), 2, self.kept(n))
        return words[:, 0].view(torch.float32), words[:, 1]
