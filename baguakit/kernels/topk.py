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

This file is the definition; `topk_gpu.py` and `topk_cpu.py` give the same result on GPUs and CPUs.
"""

import torch
from torch import Tensor

from .blockwise import format as packing

NAN = 0x7FC00000  # the bits that are sent for every NaN
SIZE, INFINITY = 0x7FFFFFFF, 0x7F800000  # the bits of a size; a NaN is larger than infinity
OUTSIDE = "a packed row has a position beyond the end of the {} values; was it packed from as many, in chunks as long?"


def select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the positions in chunks (int32) and the values (fp32) kept of rows `x`; both are (rows, kept per row).

    A full chunk keeps `k` values, a shorter one `rest`. `residual` (fp32, shape of `x`) is set as in the formula above.
    """
    v, (rows, n) = x.float(), x.shape
    whole = n // chunk * chunk
    kept = largest(v[:, :whole].reshape(rows, n // chunk, chunk), k), largest(v[:, None, whole:], rest)
    index = torch.cat(kept, 1).nonzero()[:, 1].view(rows, n // chunk * k + rest)
    values = v.gather(1, index)
    values.view(torch.int32).masked_fill_(values.isnan(), NAN)
    if residual is not None:
        residual.copy_(v).scatter_(1, index, values - values)
    return (index % chunk).int(), values


def largest(v: Tensor, k: int) -> Tensor:
    """Return whether each value of chunks (rows, chunks, width) is kept: a mask of the shape (rows, chunks · width)."""
    if not v.numel():
        return v.bool().flatten(1)
    sizes = (v.view(torch.int32) & SIZE).clamp(max=INFINITY + 1)
    threshold = sizes.topk(k, sorted=False).values.amin(2, keepdim=True)  # faster than kthvalue
    larger, equal = sizes > threshold, sizes == threshold
    wanted = k - larger.sum(2, keepdim=True)
    return (larger | equal & (equal.cumsum(2, dtype=torch.int32) <= wanted)).flatten(1)


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
    places = packing.split(*planes(packed, count, chunk), count)
    if values is None:
        values = packed[:, values_at(count, chunk) :].flatten().view(torch.float32).view(places.shape)
    return values, in_rows(places, chunk, k)


def add_(
    out: Tensor, packed: Tensor, values: Tensor | None, weights: Tensor | None, chunk: int, k: int, rest: int,
    ok: Tensor | None = None,
) -> None:  # fmt: skip
    """Add each packed row times its weight to `out` (n,), in fp32 or fp64; without weights, set it to the rows' mean.

    `values` (rows, count) are given if the packed rows do not hold fp32. `ok` becomes False if a result is not finite.
    """
    if weights is None:
        out.zero_()
        weights = torch.full((len(packed),), 1 / len(packed), dtype=torch.float32, device=out.device)
    total = out.to(torch.promote_types(out.dtype, torch.float32))
    values, places = parts_of(packed, values, len(out) // chunk * k + rest, chunk, k)
    if (places >= len(out)).any():
        raise IndexError(OUTSIDE.format(len(out)))
    for part, index in zip((values * weights.unsqueeze(1)).to(total.dtype), places, strict=True):
        total.index_add_(0, index, part)
    if total is not out:
        out.copy_(total)
    if ok is not None:
        ok.logical_and_(out.isfinite().all())
