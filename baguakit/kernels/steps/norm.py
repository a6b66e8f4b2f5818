"""The norm of all gradients, and whether they are finite.

    norm = √(Σ g²)

Squares and sums are fp64, in which no square of fp32 overflows, and in which roundings are so far below fp32 that the
order of the sum hardly ever shows; the root is rounded to fp32. A NaN or an infinity makes the norm one.

This file is the definition; `norm_gpu.py` holds the kernels, whose sum has an order of its own: each program
adds a run of values, and one program adds what they found.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .definition import dense


def gradient_norm_(norm: Tensor, grads: Sequence[Tensor], found_inf: Tensor | None) -> None:
    """Write the norm; and, in `found_inf`, 1 if it is not finite, else 0."""
    norms = [torch.linalg.vector_norm(dense(g), dtype=torch.float64) for g in grads]
    total = torch.linalg.vector_norm(torch.stack(norms)) if norms else norm.new_zeros(())
    norm.copy_(total)
    if found_inf is not None:
        found_inf.copy_(~norm.isfinite())
