"""The values of largest magnitude in each chunk of a row, with their positions, sorted by position.

A row of n values is cut in chunks of `chunk` values; the last chunk may be shorter. A chunk keeps k values:

    v         = x in fp32
    size      = the bits of |v|, as an integer          sizes have the order of magnitudes; a NaN is the largest
    threshold = the k-th largest size
    kept      = the values whose size exceeds the threshold, and the first values whose size equals the threshold
    residual  = v − v for a kept value, else v           v − v is 0, or NaN if v is not finite

The result depends on the values alone: of equal magnitudes the first positions are kept, on every device. All NaNs have
one size, and are sent as 0x7fc00000.

A packed row holds the positions, then zeros up to a multiple of 16 bytes, then the values. Positions are codes of
log₂(chunk) bits in planes of whole bytes (`blockwise/format.py`); values are in fp32, or as a compressor packs them.
Rows are added one after another. The positions in a row are distinct, so the order within a row does not matter.

This file is the definition, which CPU tensors use; `topk_gpu.py` gives the same result on GPUs. The definition uses
NumPy's partition, which takes a tenth of the time of torch's. First it cuts a chunk in groups, and drops all sizes
below the k-th largest of the groups' maxima: k maxima are at least as large, so the threshold is not lower.
"""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .blockwise import format as packing

NAN = 0x7FC00000  # the bits that are sent for every NaN
SIZE, INFINITY = 0x7FFFFFFF, 0x7F800000  # the bits of a size; a NaN is larger than infinity
PIECE = 1 << 20  # values taken at once: fewer take more calls of NumPy, which of 2¹⁵ values are most of the time
LINE = 64  # neighbours whose maximum is found fast

Bits = NDArray[np.int32]


def select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the positions in chunks (int32) and the values (fp32) kept of rows `x`; both are (rows, kept per row).

    A full chunk keeps `k` values, a shorter one `rest`. `residual` (fp32, shape of `x`) is set as in the formula above.
    """
    count = x.shape[1] // chunk * k + rest
    places = torch.empty(len(x), count, dtype=torch.int32, device=x.device)
    values = torch.empty(len(x), count, dtype=torch.float32, device=x.device)
    for row in range(len(x)):
        for columns, slots, width, wanted in pieces(x.shape[1], chunk, k, rest):
            v = x[row, columns].float() if residual is None else residual[row, columns].copy_(x[row, columns])
            bits = v.view(torch.int32).numpy().reshape(-1, width)
            sizes, at = candidates(bits & SIZE, wanted)
            at = at[largest(np.minimum(sizes, INFINITY + 1), wanted)].reshape(-1, wanted)
            kept = bits.ravel()[at.ravel()]
            kept[kept & SIZE > INFINITY] = NAN
            places[row, slots] = torch.from_numpy(at - np.arange(0, bits.size, width)[:, None]).view(-1)
            values[row, slots] = torch.from_numpy(kept).view(torch.float32)
            if residual is not None:  # which is v
                v[torch.from_numpy(at).view(-1)] = values[row, slots] - values[row, slots]
    return places, values


def pieces(n: int, chunk: int, k: int, rest: int) -> Iterator[tuple[slice, slice, int, int]]:
    """Yield (columns, slots, width, kept) for chunks of one width: `kept` values of each chunk go to the slots."""
    whole = n // chunk
    for first in range(0, whole, PIECE // chunk):
        last = min(first + PIECE // chunk, whole)
        yield slice(first * chunk, last * chunk), slice(first * k, last * k), chunk, k
    if n % chunk:
        yield slice(whole * chunk, n), slice(whole * k, None), n % chunk, rest


def largest(sizes: Bits, k: int) -> NDArray[np.bool_]:
    """Return a mask of the `k` ≥ 1 kept values of each row of sizes, as in the module docstring."""
    threshold = np.partition(sizes, sizes.shape[1] - k, axis=1)[:, -k, None]
    kept: NDArray[np.bool_] = sizes >= threshold
    if np.count_nonzero(kept) > k * len(kept):  # some equals are too many
        larger, equal = sizes > threshold, sizes == threshold
        kept = larger | equal & (equal.cumsum(1) <= k - np.count_nonzero(larger, 1, keepdims=True))
    return kept


def candidates(sizes: Bits, k: int) -> tuple[Bits, NDArray[np.int64]]:
    """Return a row of candidates for each chunk, padded with −1, and their positions; all sizes to keep are in it."""
    chunks, width = sizes.shape
    maxima, line = maxima_of(sizes, k)
    reached = np.minimum(np.partition(maxima, maxima.shape[1] - k, axis=1)[:, -k], INFINITY)
    found = (maxima if line > 1 else sizes) >= np.maximum(reached, 1)[:, None]
    if not reached.all():  # of zeros only the first can be kept
        found[reached == 0, : -(-k // line)] = True
    at = np.flatnonzero(found)
    if line > 1:
        inside = np.flatnonzero(sizes.reshape(-1, line)[at] >= reached[at // (width // line), None])
        at = at[inside // line] * line + inside % line
    counts = np.diff(np.searchsorted(at, np.arange(chunks + 1) * width))
    there = np.arange(counts.max()) < counts[:, None]
    few, places = np.full(there.shape, -1, np.int32), np.zeros(there.shape, np.int64)
    few[there], places[there] = sizes.ravel()[at], at
    return few, places


def maxima_of(sizes: Bits, k: int) -> tuple[Bits, int]:
    """Return the maxima of each chunk's groups, and the length of a group if its values are adjacent, else 1.

    If few values are kept, groups are lines of adjacent values. Else smaller groups of scattered values are faster.
    """
    chunks, width = sizes.shape
    if 8 * k * LINE <= width and width % LINE == 0:
        return torch.from_numpy(sizes.reshape(chunks, -1, LINE)).amax(2).numpy(), LINE
    groups = max(LINE, 1 << (4 * k - 1).bit_length())
    if groups < width and width % groups == 0:
        return torch.from_numpy(sizes.reshape(chunks, -1, groups)).amax(1).numpy(), 1
    return sizes, 1


def values_at(count: int, chunk: int) -> int:
    """Return the byte at which the values begin in a packed row of `count` values."""
    return packing.aligned(-(-count // 8) * (chunk.bit_length() - 1))


def planes(packed: Tensor, count: int, chunk: int) -> tuple[tuple[Tensor, ...], int]:
    """Return the planes that hold the positions of `count` values, and the number of bits of a position."""
    bits = chunk.bit_length() - 1
    sizes = [-(-count // 8) * plane for plane in packing.PLANES[bits]]
    return torch.split(packed[:, : sum(sizes)], sizes, 1), bits


def join_(packed: Tensor, places: Tensor, values: Tensor | None, chunk: int, ok: Tensor | None = None) -> None:
    """Write positions (rows, count), zeros as padding, and values if they are given, to packed rows.

    Set the bool `ok` to True, to save a separate launch; `add_` sets it to False if a mean is not finite.
    """
    if ok is not None:
        ok.fill_(True)
    count = places.shape[1]
    at = values_at(count, chunk)
    packed[:, :at].zero_()
    parts, bits = planes(packed, count, chunk)
    packing.join_(parts, torch.nn.functional.pad(places, (0, -count % 8)), bits)
    if values is not None:
        packed[:, at:] = values.view(torch.uint8)


def in_rows(places: Tensor, chunk: int, k: int) -> Tensor:
    """Convert `places` (rows, count), which are positions in chunks, to positions in rows."""
    count = places.shape[1]
    starts = torch.arange(0, -(-count // k) * chunk, chunk, device=places.device)
    return places + starts.repeat_interleave(k)[:count]


def parts_of(packed: Tensor, values: Tensor | None, count: int, chunk: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the values of packed rows (or `values`, if given) and their positions in the row, both (rows, count)."""
    places = packing.split(*planes(packed, count, chunk)).flatten(1)[:, :count]
    if values is None:
        values = packed[:, values_at(count, chunk) :].flatten().view(torch.float32).view(places.shape)
    return values, in_rows(places, chunk, k)


def add_(
    out: Tensor, packed: Tensor, values: Tensor | None, weights: Tensor | None, chunk: int, k: int, rest: int,
    ok: Tensor | None = None,
) -> None:  # fmt: skip
    """Add each packed row times its weight to `out` (n,), in fp32 or fp64; without weights, set it to the rows' mean.

    `values` (rows, count) are given if the packed rows do not hold fp32 values. The bool `ok` becomes False if a result
    is not finite.
    """
    if weights is None:
        out.zero_()
        weights = torch.full((len(packed),), 1 / len(packed), dtype=torch.float32, device=out.device)
    total = out.to(torch.promote_types(out.dtype, torch.float32))
    values, places = parts_of(packed, values, len(out) // chunk * k + rest, chunk, k)
    for part, index in zip((values * weights.unsqueeze(1)).to(total.dtype), places, strict=True):
        total.index_add_(0, index, part)
    if total is not out:
        out.copy_(total)
    if ok is not None:
        ok.logical_and_(out.isfinite().all())
