"""`topk` as an operator of torch: CUDA tensors take the kernel, all others the definition."""

from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..shared.tracing import Operator
from . import definition


def _fake_select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], x.shape[1] // chunk * k + rest)
    return x.new_empty(shape, dtype=torch.int32), x.new_empty(shape, dtype=torch.float32)


@partial(Operator, mutates={"residual"}, name="topk_select", fake=_fake_select)
def select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the places and values of the `k` largest of each chunk of rows `x` (rows, n), and `rest` of a shorter one.

    `residual` (fp32, same shape) receives all the others.
    """
    if not x.is_cuda:
        return definition.select(x, chunk, k, rest, residual)
    from . import gpu

    if residual is not None:
        increment_version(residual)  # kernels write unseen
    return gpu.select(x, chunk, k, rest, residual)
