"""Checks of the arguments of collectives, and memory for their results."""

import math
from collections.abc import Sequence

from torch import Tensor

from ...arguments import instance, shown, tensor
from ...comm import Comm, check_comm
from ...compressors import Compressor
from ...compressors.base import Unchecked, check_dense, check_dtype
from ..compressed import compresses


def values_in(x: Tensor, compressor: Compressor | None, comm: Comm) -> Tensor:
    """Return the values of `x`, flat and contiguous, once the arguments of a primitive have been checked."""
    check_arguments(x, compressor, comm)
    return x.detach().reshape(-1)


def check_arguments(x: Tensor, compressor: Compressor | None, comm: Comm) -> None:
    """Raise unless `x` has values that a compressor takes, and the others are what they are called."""
    check_comm(comm)
    if compressor is not None:
        check_dense("compressor", compressor)
    check_dtype("x", tensor("x", x, floating=True).dtype)


def codec_of(
    x: Tensor, compressor: Compressor | None, comm: Comm, values: int | None = None, rows: int | None = None
) -> Unchecked | None:
    """Return the operations of a compressor if values like `x` are to be sent compressed, and note it; else None.

    Args:
        values: how many are sent, by all ranks for an all-gather; None for those of `x`.
        rows: in how many messages of equal length; None for one for each rank.
    """
    if compressor is None:
        return None
    codec = compressor._unchecked(x)
    number = x.numel() if values is None else values
    return codec if compresses(number, x.dtype, compressor, codec, comm, rows) and comm.size > 1 else None


def width_of(x: Tensor) -> int:
    """Return the number of values at each index of dimension 0."""
    return math.prod(x.shape[1:])


def output(out: Tensor | None, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `out`, or a new tensor of this shape without it; raise unless it has room for values like those of `x`."""
    if out is None:
        return x.new_empty(shape)
    instance("out", out, Tensor, "a tensor")
    values = math.prod(shape)
    if out.numel() != values or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(f"out is a contiguous tensor of {values} values of {x.dtype} on {x.device}, not {shown(out)}")
    return out


def share_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two contiguous tensors have bytes in common."""
    return max(a.data_ptr(), b.data_ptr()) < min(a.data_ptr() + a.nbytes, b.data_ptr() + b.nbytes)
