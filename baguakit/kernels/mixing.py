"""Update a tensor from received tensors in one pass: a weighted mix, and the landing of an asynchronous result.

    mix    x ← w₀ x + Σ_k w_k y_k                              4 (k + 2) bytes a value in fp32
    land   x ← r where x = b, else x + (r − b)                 16 bytes a value in fp32

Mixing uses fp32 (fp64 for fp64), in the order of the tensors: w₀ x is rounded, then each product is added to the sum
with one rounding for both (a fused multiply-add). A narrower dtype is rounded to only at the end. Landing uses the
dtype of x, and each operation rounds to it. If x still equals b, it becomes r bit for bit; otherwise the change of x
since b is kept. A NaN equals nothing, so that it stays NaN.

This file is the definition, which CPU tensors use; `mixing_gpu.py` has the same arithmetic for GPUs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RUN = 1 << 17  # values whose temporaries stay in cache

WIDE = (torch.float32, torch.float64)


def mix_(x: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Mix tensors of one length and dtype:  x ← weights[0] · x + Σ weights[k] · others[k − 1]."""
    for run in _runs(x, x.numel() if x.dtype in WIDE else RUN):  # without temporaries the longest run is the fastest
        total = x[run] if x.dtype in WIDE else x[run].float()
        total.mul_(weights[0])
        for y, weight in zip(others, weights[1:], strict=True):
            total.add_(y[run], alpha=weight)
        if x.dtype not in WIDE:
            x[run].copy_(total)


def land_(x: Tensor, result: Tensor, before: Tensor, good: Tensor | None = None) -> None:
    """Land a result:  x ← result where x equals `before`, else x + (result − before), which keeps later changes.

    If the bool `good` is False, x does not change.
    """
    for run in _runs(x, RUN):
        now, then = x[run], before[run]
        landed = torch.where(now == then, result[run], now + (result[run] - then))
        now.copy_(landed if good is None else torch.where(good, landed, now))


def _runs(x: Tensor, length: int) -> list[Any]:
    """Return the parts of a long row. A short row, or a tensor of any other shape, is one part."""
    if x.dim() != 1 or len(x) <= length:
        return [...]
    return [slice(i, i + length) for i in range(0, len(x), length)]
