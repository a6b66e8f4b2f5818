"""The operations of `minmax_uint8` as operators of torch, which `torch.compile` passes over.

CUDA tensors take the kernels, and import them at the first; all others take the definition. No argument has a
default, because torch 2.11 looks for mutated arguments among those that are not.
"""

from typing import Any

import torch
from torch import Tensor

from . import minmax_uint8 as definition


@torch.library.custom_op("baguakit::minmax_uint8_compress", mutates_args={"residual"})
def compress(x: Tensor, block: int | None, residual: Tensor | None, key: int | None) -> Tensor:
    """Return the packed rows of `x` (rows, n); `residual` (fp32, same shape) receives what they lost."""
    packed: Tensor = _for(x, block).compress(x, block, residual, key)
    return packed


@torch.library.custom_op("baguakit::minmax_uint8_decompress_", mutates_args={"out"})
def decompress_(out: Tensor, packed: Tensor, block: int | None) -> None:
    """Write the values of each packed row into `out` (rows, n)."""
    _for(packed, block).decompress_(out, packed, block)


@torch.library.custom_op("baguakit::minmax_uint8_add_", mutates_args={"out"})
def add_(out: Tensor, packed: Tensor, weights: Tensor, block: int | None) -> None:
    """Add the packed rows, each times its weight (fp32), one after another to `out` (n,), all in fp32."""
    _for(packed, block).add_(out, packed, weights, block)


@torch.library.custom_op("baguakit::minmax_uint8_reduce", mutates_args={"residual"})
def reduce(packed: Tensor, n: int, block: int | None, residual: Tensor | None, key: int | None) -> Tensor:
    """Return the mean of the packed rows, summed in their order and divided by their number, packed again.

    To `residual` (fp32, (n,)) is added the number of rows times what the second packing lost.
    """
    sent: Tensor = _for(packed, block).reduce(packed, n, block, residual, key)
    return sent


@compress.register_fake
def _(x: Tensor, block: int | None, residual: Tensor | None, key: int | None) -> Tensor:
    return x.new_empty(x.shape[0], definition.row_bytes(x.shape[1], block), dtype=torch.uint8)


@reduce.register_fake
def _(packed: Tensor, n: int, block: int | None, residual: Tensor | None, key: int | None) -> Tensor:
    return packed.new_empty(1, definition.row_bytes(n, block))


def _for(values: Tensor, block: int | None) -> Any:
    # One range for a whole row is there for comparison, and has no kernel.
    if block is None or not values.is_cuda:
        return definition
    from . import minmax_uint8_triton

    return minmax_uint8_triton
