"""Update a tensor x in one pass: mix received tensors y_k into it, or apply ("land") an asynchronous result r.

    mix    x ← w₀ x + Σ_k w_k y_k  for K tensors y_k           moves 4 (K + 2) bytes a value in fp32
    land   x ← r where x = b, else x + (r − b)                 moves 16 bytes; r was computed from b, an earlier x

Mixing computes in fp32 (fp64 tensors in fp64), in the order of the tensors: w₀ x is rounded, then each product is added
by a fused multiply-add, which rounds once. Narrower dtypes are rounded only at the end. Landing computes in the dtype
of x, and rounds after each operation. A value that still equals b becomes r exactly; in other values, the change of x
since b is kept. A NaN equals nothing, so a NaN in x stays NaN.

This file is the definition. The kernels have the same arithmetic: `mixing_gpu.py` for GPUs, `mixing.c` for CPUs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


def mix_(x: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Mix tensors of one length and dtype:  x ← weights[0] · x + Σ weights[k] · others[k − 1]."""
    total = x if x.dtype in WIDE else x.float()
    total.mul_(weights[0])
    for y, weight in zip(others, weights[1:], strict=True):
        total.add_(y, alpha=weight)
    if total is not x:
        x.copy_(total)


def land_(x: Tensor, result: Tensor, before: Tensor, good: Tensor | None = None) -> None:
    """Set x ← result where x equals `before`, else x + (result − before), if `good`; so changes since then are kept."""
    landed = torch.where(x == before, result, x + (result - before))
    x.copy_(landed if good is None else torch.where(good, landed, x))
