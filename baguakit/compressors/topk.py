"""The largest values, each with its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..arguments import check_fields, describe, integer, real
from ..kernels import operators as topk_ops
from ..kernels.blockwise.format import aligned, join_, planes_of, split
from .base import MOST, PROBE, Compressor, warmed

CHUNKS = tuple(1 << power for power in range(6, 13))


@dataclass(frozen=True, repr=False)
class TopK(Compressor):
    """The `ratio` of each chunk of a row that is largest in magnitude: values, and places in the bits a chunk needs.

    A row is cut in chunks; the last one ends with the row. Of each at least one value is kept, and of equal ones the
    first: what is sent depends on the values alone. A place takes log₂(chunk) bits, 12 by default, and a value four
    bytes, or what `values` packs it in, for all values of a row at once. Places rise, and none occurs twice, so that
    rows can be added in any device's own way and yet with the same result. What is not finite counts as largest and is
    passed on. Nothing waits for a GPU. Ranks keep different places, so there is no `reduce`: use it in `SparseMean`.

    `TopK(0.0156, values=UInt2())` sends 14.25 bits for each value that it keeps.

    Args:
        ratio: the share of the values of a chunk that is kept, in (0, 1].
        chunk: how many values a chunk has: a power of two, 64 to 4096.
        values: how the values that are kept are compressed, by any dense compressor; None: in fp32.
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
        """Return how many values of a row of `n` are kept."""
        whole, rest = divmod(integer("n", n, 0, MOST), self.chunk)
        return whole * self._kept_of(self.chunk) + self._kept_of(rest)

    def row_bytes(self, n: int) -> int:
        count = self.kept(n)
        return self._values_at(count) + (4 * count if self.values is None else self.values._unchecked_row_bytes(count))

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        rest = self._kept_of(x.shape[1] % self.chunk)
        places, kept = topk_ops.select(x, self.chunk, self._kept_of(self.chunk), rest, residual)
        packed = x.new_empty(len(x), self.row_bytes(x.shape[1]), dtype=torch.uint8)
        at = self._values_at(kept.shape[1])
        packed[:, :at].zero_()
        codes = torch.nn.functional.pad(places, (0, -places.shape[1] % 8))
        planes, bits = self._planes(packed, kept.shape[1])
        join_(planes, codes, bits)
        if self.values is None:
            packed[:, at:] = kept.view(torch.uint8)
        else:
            lost = None if residual is None else torch.empty_like(kept)
            packed[:, at:] = self.values._unchecked_compress(kept, lost, key)
            if residual is not None and lost is not None:
                residual.scatter_(1, self._index(places), lost)
        return packed

    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        values, index = self._parts(packed, n)
        out = packed.new_zeros(len(packed), n, dtype=dtype) if out is None else out.zero_()
        return out.scatter_(1, index, values.to(out.dtype))

    def add_(self, out: Tensor, packed: Tensor, weights: Sequence[float] | Tensor) -> Tensor:
        wide = torch.promote_types(out.dtype, torch.float32)
        total = out.to(wide)
        values, places = self._parts(packed, len(out))
        weighted = values * torch.as_tensor(weights).unsqueeze(1)
        for part, index in zip(weighted.to(wide), places, strict=True):
            if total.is_cpu:
                total.index_add_(0, index, part)
            else:  # the atomic sums of GPUs take subnormal numbers for zeros
                total[index] = total[index] + part
        return out if total is out else out.copy_(total)

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        raise TypeError(f"{self!r} keeps other places of each rank's values; average them with SparseMean({self!r})")

    def warm_up(self, device: torch.device | str, dtype: torch.dtype = torch.float32, values: int = PROBE) -> None:
        """Compile before the first step all that it needs, for a row of `values` on a device."""
        if warmed(device, dtype, values) != "cpu" and values:
            x = torch.zeros(1, values, dtype=dtype, device=device)
            self.compress(x, torch.empty_like(x, dtype=torch.float32))
            self.compress(x)
        if self.values is not None:
            self.values.warm_up(device, torch.float32, self.kept(values))

    def _kept_of(self, length: int) -> int:
        return min(length, max(1, round(self.ratio * length)))

    # A packed row: the places, in planes of whole bytes, then zeros up to a multiple of 16 bytes, then the values.

    def _values_at(self, count: int) -> int:
        return aligned(-(-count // 8) * (self.chunk.bit_length() - 1))

    def _planes(self, packed: Tensor, count: int) -> tuple[tuple[Tensor, ...], int]:
        """Return the planes of the places of `count` values, and the bits of a place."""
        bits = self.chunk.bit_length() - 1
        sizes = [-(-count // 8) * plane for plane in planes_of(bits)]
        return torch.split(packed[:, : sum(sizes)], sizes, 1), bits

    def _parts(self, packed: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """Return the values of packed rows in fp32, and their places in the row."""
        count = self.kept(n)
        places = split(*self._planes(packed, count)).flatten(1)[:, :count]
        sent = packed[:, self._values_at(count) :]
        if self.values is None:
            values = sent.flatten().view(torch.float32).view(places.shape)
        else:
            values = self.values._unchecked_decompress(sent, count, torch.float32, None)
        return values, self._index(places)

    def _index(self, places: Tensor) -> Tensor:
        count, k = places.shape[1], self._kept_of(self.chunk)
        starts = torch.arange(0, -(-count // k) * self.chunk, self.chunk, device=places.device)
        return places + starts.repeat_interleave(k)[:count]
