"""The largest values of a row by magnitude, each with its place, in the order of their places.

    v         = x in fp32
    size      = the bits of |v|, as an integer          of numbers in the order of their magnitude; a NaN is the largest
    threshold = the k-th largest size
    kept      = all larger than the threshold, and of its equals the first
    residual  = v − v where kept, else v                 0, or NaN where v is not finite

On the wire a row is the k values kept, in fp32, and their k places, as rising int32. It depends on the values alone:
of equal magnitudes the first places are taken, on every device. All NaNs are of one size, and travel as 0x7fc00000.

This file is the definition, and what CPU tensors take; `gpu.py` finds the same for GPUs. The threshold is
found by NumPy, whose partition takes a tenth of the time of torch's. Of a long row the few that may be kept are found
first, in one reading: a guess at the threshold, from a sample, is lower than the threshold if k sizes or more reach it,
and then all that is kept is among them. If fewer do, the guess is forgotten.
"""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NAN = 0x7FC00000  # the size of every NaN, above that of infinity, and the bits that are sent
INFINITY = 0x7F800000

SAMPLE = 1 << 15  # values, about, from which the threshold of a row four times as long or longer is guessed
PIECE = 1 << 16  # values read at once, whose sizes stay in the cache

Bits = NDArray[np.uint32]
Places = NDArray[np.int64]


def compress(x: Tensor, k: int, residual: Tensor | None = None) -> Tensor:
    """Return rows (rows, 8 k) of bytes from rows of values; `residual` (fp32, shape of `x`) receives all the others."""
    v = x.contiguous().float() if residual is None else residual.copy_(x)
    packed = torch.empty(len(x), 2, k, dtype=torch.int32, device=x.device)
    for row, (values, places) in zip(v, packed if k else [], strict=False):
        at = torch.from_numpy(kept_of(row.view(torch.int32).numpy().view(np.uint32), k))
        kept = row[at]
        values.view(torch.float32).copy_(kept)
        values[kept.isnan()] = NAN
        places.copy_(at)
        if residual is not None:  # which is v
            row[at] = kept - kept
    return packed.view(len(x), 2 * k).view(torch.uint8)


def kept_of(row: Bits, k: int) -> Places:
    """Return the rising places (k,) of the `k` ≥ 1 largest sizes of a row of fp32 bits, of equal ones the first."""
    guess = guess_at(row, k)
    if guess:
        places = reaching(guess, row)
        if len(places) >= k:
            return places[largest(row[places], k)]
    return largest(row, k)


def largest(row: Bits, k: int) -> Places:
    """Return what `kept_of` returns, computed as the equations say it."""
    sizes = sizes_of(row)
    threshold = np.partition(sizes, len(row) - k)[len(row) - k]
    kept = sizes > threshold
    kept[np.flatnonzero(sizes == threshold)[: k - np.count_nonzero(kept)]] = True
    return np.flatnonzero(kept)


def sizes_of(row: Bits) -> Bits:
    """Return integers in the order of the magnitudes."""
    sizes = row & np.uint32(0x7FFFFFFF)
    sizes[sizes > INFINITY] = NAN
    return sizes


def guess_at(row: Bits, k: int) -> int:
    """Return a size that somewhat more than `k` of a row probably reach; 0 where a guess would not pay."""
    if len(row) < 4 * SAMPLE:
        return 0
    sample = sizes_of(row[:: len(row) // SAMPLE | 1])  # an odd stride meets all columns of most matrices
    expected = k * len(sample) / len(row)
    reached = math.ceil(expected + 4 * math.sqrt(expected) + 4)  # four standard deviations: one in 30,000 is too high
    if reached > len(sample) // 4:
        return 0
    return max(1, int(np.partition(sample, len(sample) - reached)[len(sample) - reached]))


def reaching(guess: int, row: Bits) -> Places:
    """Return the rising places of the sizes that are `guess` or larger. A guess above infinity counts as infinity."""
    doubled, found = np.uint32(2 * min(guess, INFINITY)), []  # bits shifted to the left are twice the size
    shifted, reach = np.empty(PIECE, np.uint32), np.empty(PIECE, np.bool_)
    for start in range(0, len(row), PIECE):
        piece = row[start : start + PIECE]
        np.left_shift(piece, 1, out=shifted[: len(piece)])
        np.greater_equal(shifted[: len(piece)], doubled, out=reach[: len(piece)])
        found.append(np.flatnonzero(reach[: len(piece)]) + start)
    return np.concatenate(found)
