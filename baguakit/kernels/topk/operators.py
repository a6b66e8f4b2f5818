"""`topk` as an operator of torch, which `torch.compile` passes over.

CUDA tensors take the kernels, and import them at the first; all others take the definition. No argument has a default,
because torch 2.11 looks for mutated arguments among those that are not.
"""

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..shared.tracing import operator
from . import definition


@operator(mutates={"residual"}, name="topk_compress")
def compress(x: Tensor, k: int, residual: Tensor | None) -> Tensor:
    """Return the `k` largest of each row of `x` (rows, n), packed; `residual` (fp32, same shape) receives the rest."""
    if not x.is_cuda:
        return definition.compress(x, k, residual)
    from . import gpu

    if residual is not None:
        increment_version(residual)  # kernels write unseen
    return gpu.compress(x, k, residual)


def _fake_compress(x: Tensor, k: int, residual: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], 8 * k, dtype=torch.uint8)


compress.registered.register_fake(_fake_compress)
