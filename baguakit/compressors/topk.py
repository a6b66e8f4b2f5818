"""The sparse compressor `TopK`: the largest values, each with its position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import check_fields, describe, integer, real
from ..kernels import operators as topk_ops
from ..kernels import topk
from .base import MOST, PROBE, Compressor, warmed

CHUNKS = tuple(1 << power for power in range(6, 13))


@dataclass(frozen=True, repr=False)
class TopK(Compressor):
    """The share `ratio` of the values of each chunk, the largest in magnitude, with their positions in the chunk.

    A row is cut in chunks; the last chunk ends with the row. At least one value of each chunk is kept. Of equal values
    the first is kept, so that the result depends on the values alone. A position takes log₂(chunk) bits, 12 by default.
    A value takes four bytes; or `values` compresses all kept values of a row together. The positions of a row rise and
    differ, so that adding rows gives the same result on every device. A value that is not finite counts as the largest
    and is passed on. The host does not wait. Ranks keep different positions, so there is no `reduce`: use `SparseMean`.

    `TopK(0.0156, values=UInt2())` sends 14.25 bits for each value that it keeps.

    Args:
        ratio: the share of the values of a chunk that is kept, in (0, 1].
        chunk: the number of values per chunk: a power of two, 64 to 4096.
        values: a dense compressor for the kept values; None: they are sent in fp32.
    """

    ratio: float
    chunk: int = 4096
    values: Compressor | None = None
    dense: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "ratio", real("ratio", self.ratio, most=1, above=0))
        if self.chunk not in CHUNKS:
            raise ValueError(
                f"TopK takes a chunk of {CHUNKS[0]} to {CHUNKS[-1]} values, a power of two, not {describe(self.chunk)}"
            )
        if self.values is not None and not self.values.dense:
            raise ValueError(
                f"values is how TopK compresses all values that it keeps, and {self.values!r} leaves some out; "
                "use a dense compressor such as UInt2()"
            )

    def kept(self, n: int) -> int:
        """Return the number of values that are kept of a row of `n`."""
        whole, rest = divmod(integer("n", n, 0, MOST), self.chunk)
        return whole * self._kept_of(self.chunk) + self._kept_of(rest)

    def row_bytes(self, n: int) -> int:
        count, inner = self.kept(n), self.values
        return topk.values_at(count, self.chunk) + (4 * count if inner is None else inner._unchecked_row_bytes(count))

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        return self._compress_with_check(x, residual, key, None)

    def _compress_with_check(self, x: Tensor, residual: Tensor | None, key: int, ok: Tensor | None) -> Tensor:
        """Return packed rows, and set `ok` to True. `add_` sets it to False if the mean is not finite."""
        places, kept = topk_ops.select(x, *self._counts(x.shape[1]), residual)
        packed = x.new_empty(len(x), self.row_bytes(x.shape[1]), dtype=torch.uint8)
        topk_ops.join_(packed, places, kept if self.values is None else None, self.chunk, ok)
        if self.values is not None:
            lost = None if residual is None else torch.empty_like(kept)
            at = topk.values_at(kept.shape[1], self.chunk)
            packed[:, at:] = self.values._unchecked_compress(kept, lost, key)
            if residual is not None and lost is not None:
                residual.scatter_(1, topk.in_rows(places, *self._counts(0)[:2]), lost)
        return packed

    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        count, k = self.kept(n), self._kept_of(self.chunk)
        values, index = topk.parts_of(packed, self._values(packed, count), count, self.chunk, k)
        out = packed.new_zeros(len(packed), n, dtype=dtype) if out is None else out.zero_()
        return out.scatter_(1, index, values.to(out.dtype))

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        return self._add(out, packed, torch.as_tensor(weights), None)

    def _mean_of(self, packed: Tensor, out: Tensor, ok: Tensor | None = None) -> None:
        self._add(out, packed, None, ok)

    def _add(self, out: Tensor, packed: Tensor, weights: Tensor | None, ok: Tensor | None) -> Tensor:
        values = self._values(packed, self.kept(len(out)))
        topk_ops.add_rows_(out, packed, values, weights, *self._counts(len(out)), ok)
        return out

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        raise TypeError(f"{self!r} keeps other places of each rank's values; average them with SparseMean({self!r})")

    def warm_up(self, device: torch.device | str, dtype: torch.dtype = torch.float32, values: int = PROBE) -> None:
        """Compile the code of this compressor before the first step, for a row of `values` values on a device."""
        if warmed(device, dtype, values) != "cpu" and values:
            ok = torch.empty((), dtype=torch.bool, device=device)
            for each in dict.fromkeys((torch.float32, dtype)):
                x = torch.zeros(1, values, dtype=each, device=device)
                self.compress(x, torch.empty_like(x, dtype=torch.float32))
                packed = self._compress_with_check(x, None, 0, ok)
                self.add_(x[0], packed, [1.0])
                self._mean_of(packed, x[0], ok)
        if self.values is not None:
            self.values.warm_up(device, torch.float32, self.kept(values))

    def _kept_of(self, length: int) -> int:
        return min(length, max(1, round(self.ratio * length)))

    def _counts(self, n: int) -> tuple[int, int, int]:
        """Return the length of a chunk, the number of kept values in it, and in the last chunk of `n` values."""
        return self.chunk, self._kept_of(self.chunk), self._kept_of(n % self.chunk)

    def _values(self, packed: Tensor, count: int) -> Tensor | None:
        """Return the values of packed rows in fp32; None if the rows hold fp32 values already, or no values."""
        if self.values is None or count == 0:
            return None
        sent = packed[:, topk.values_at(count, self.chunk) :].contiguous()
        return self.values._unchecked_decompress(sent, count, torch.float32, None)
