"""Update a tensor x in one pass: mix received tensors y_k into it, or apply ("land") an asynchronous result r.

    mix    x ← w₀ x + Σ_k w_k y_k  for K tensors y_k           moves 4 (K + 2) bytes a value in fp32
    land   x ← r where x = b, else x + (r − b)                 moves 16 bytes; r was computed from b, an earlier x

Mixing computes in fp32 (fp64 tensors in fp64), in the order of the tensors: w₀ x is rounded, then each product is added
by a fused multiply-add, which rounds once. Narrower dtypes are rounded only at the end. Landing computes in the dtype
of x, and rounds after each operation. A value that still equals b becomes r exactly; in other values, the change of x
since b is kept. A NaN equals nothing, so a NaN in x stays NaN.

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
    """Set x ← result where x equals `before`, else x + (result − before), which keeps changes of x since `before`.

    If the bool `good` is False, x does not change.
    """
    for run in _runs(x, RUN):
        now, then = x[run], before[run]
        landed = torch.where(now == then, result[run], now + (result[run] - then))
        now.copy_(landed if good is None else torch.where(good, landed, now))


def _runs(x: Tensor, length: int) -> list[Any]:
    """Return slices that cut a row every `length` values. A shorter row, or a tensor of another shape, is not cut."""
    if x.dim() != 1 or len(x) <= length:
        return [...]
    return [slice(i, i + length) for i in range(0, len(x), length)]
