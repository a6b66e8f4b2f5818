"""`mixing` as operators of torch: CUDA tensors take the kernels, all others the definition."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from ..shared.tracing import Operator, imported
from . import definition


@partial(Operator, mutates={"x"})
def mix_(x: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Mix tensors:  x ← weights[0] · x + Σ weights[k] · others[k − 1]."""
    _check_alike(x, others)
    if len(weights) != len(others) + 1:
        raise ValueError(
            f"{len(others) + 1} tensors are mixed with as many weights, the first one's first, not {len(weights)}"
        )
    for other in others:
        if other.dtype != x.dtype:
            raise TypeError(f"tensors are mixed in one dtype, that of the first, {x.dtype}, not {other.dtype}")
        if other.numel() and other.data_ptr() == x.data_ptr():
            raise ValueError("a tensor is mixed into itself: it would be read after it was written; clone it first")
    if not x.is_contiguous():
        raise ValueError("the tensor that others are mixed into is contiguous; this one has gaps: use .contiguous()")
    _for(x).mix_(x.view(-1), [other.reshape(-1) for other in others], weights)


@partial(Operator, mutates={"x"})
def land_(x: Tensor, result: Tensor, before: Tensor) -> None:
    """Land a result:  x ← result where x equals `before`, else x + (result − before)."""
    _check_alike(x, (result, before))
    if all(t.is_contiguous() and t.dtype == x.dtype for t in (x, result, before)):
        _for(x).land_(x.view(-1), result.view(-1), before.view(-1))
    else:  # the definition takes any strides, and promotes
        definition.land_(x, result, before)


def _check_alike(x: Tensor, others: Sequence[Tensor]) -> None:
    if not x.is_floating_point():
        raise TypeError(f"tensors of a floating dtype are mixed, not of {x.dtype}; convert them with .float()")
    for other in others:
        if other.shape != x.shape or other.device != x.device:
            raise ValueError(
                f"all have the shape and the device of the first, {tuple(x.shape)} on {x.device}, not "
                f"{tuple(other.shape)} on {other.device}"
            )


def _for(x: Tensor) -> Any:
    if not x.is_cuda:
        return definition
    increment_version(x)  # kernels write unseen
    return imported(".gpu", __package__)
