"""The largest values of a row by magnitude, each with its place, in the order of their places.

    v         = x in fp32
    size      = the bits of |v|, as an integer          of numbers in the order of their magnitude; a NaN is the largest
    threshold = the k-th largest size
    kept      = all larger than the threshold, and of its equals the first
    residual  = v − v where kept, else v                 0, or NaN where v is not finite

On the wire a row is the k values kept, in fp32, and their k places, as rising int32. It depends on the values alone:
of equal magnitudes the first places are taken, on every device. All NaNs are of one size, and travel as 0x7fc00000.

This file is the definition, and what CPU tensors take; `topk_triton.py` finds the same for GPUs. The threshold is
found by NumPy, whose partition takes a tenth of the time of torch's.
"""

import numpy as np
import torch
from torch import Tensor

NAN = 0x7FC00000  # the size of every NaN, above that of infinity, and the bits that are sent


def sizes_of(v: Tensor) -> Tensor:
    """Integers in the order of the magnitudes of fp32 values."""
    return v.view(torch.int32).bitwise_and(0x7FFFFFFF).masked_fill_(v.isnan(), NAN)


def places_of(sizes: Tensor, k: int) -> Tensor:
    """The rising places (k,) of the `k` ≥ 1 largest sizes of a row, of equal ones the first."""
    row = sizes.numpy()
    threshold = np.partition(row, len(row) - k)[len(row) - k]
    larger, equal = np.flatnonzero(row > threshold), np.flatnonzero(row == threshold)
    return torch.from_numpy(np.sort(np.concatenate([larger, equal[: k - len(larger)]])))


def compress(x: Tensor, k: int, residual: Tensor | None = None) -> Tensor:
    """Return rows (rows, 8 k) of bytes from rows of values; `residual` (fp32, shape of `x`) receives all the others."""
    v = x.contiguous().float()
    packed = torch.empty(len(x), 2, k, dtype=torch.int32, device=x.device)
    if residual is not None:
        residual.copy_(v)
    for row, (values, places) in enumerate(packed if k else []):
        at = places_of(sizes_of(v[row]), k)
        kept = v[row][at]
        values.view(torch.float32).copy_(kept)
        values[kept.isnan()] = NAN
        places.copy_(at)
        if residual is not None:
            residual[row][at] = kept - kept
    return packed.view(len(x), 2 * k).view(torch.uint8)
