"""Primitives for flat tensors, which take any tensor or a list of tensors."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from ..arguments import message, several
from ..buckets import real

P = ParamSpec("P")
Tensors = TypeVar("Tensors", bound=Tensor | Sequence[Tensor])


def on_flat(primitive: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[Concatenate[Tensors, P], Tensors]:
    """Let `primitive(x, …)`, written for a contiguous 1-D tensor, take any tensor or a list of tensors.

    A list travels as one message for each dtype and device in it. Tensors are overwritten in place and returned.
    """

    @wraps(primitive)
    def wrapped(x: Tensors, *args: P.args, **options: P.kwargs) -> Tensors:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return wrapped(x, *args, **options)
        if isinstance(x, Tensor):
            tensors: list[Tensor] = [torch.view_as_real(x) if x.is_complex() else x]
        else:
            listed = several("x", x, "a tensor or a list of tensors", ordered=True)
            tensors = [real(each) if isinstance(each, Tensor) else each for each in listed]
        for tensor in tensors:
            check_averageable(tensor)
        for alike in _alike(tensors) if len(tensors) != 1 else [tensors]:
            if len(alike) == 1 and alike[0].is_contiguous():
                primitive(alike[0].view(-1), *args, **options)
            else:
                flat = primitive(torch.cat([t.detach().flatten() for t in alike]), *args, **options)
                sizes = [t.numel() for t in alike]
                torch._foreach_copy_(alike, [p.view(t.shape) for p, t in zip(flat.split(sizes), alike, strict=True)])
        return x

    return cast(Callable[Concatenate[Tensors, P], Tensors], wrapped)


def check_averageable(x: Tensor) -> None:
    """Raise a TypeError unless `x` is a dense floating tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(message("x", "a tensor or a list of tensors", x))
    if not x.is_floating_point():
        pairs = "give torch.view_as_real(x)" if x.is_complex() else "convert it to a floating dtype first"
        raise TypeError(f"x of dtype {x.dtype} cannot be averaged; {pairs}")
    if x.layout is not torch.strided:
        raise TypeError(f"x of layout {x.layout} cannot be averaged; call .to_dense() first")
    if not x.is_contiguous() and any(n > 1 and not s for n, s in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(message("x", "a tensor whose values lie apart", x) + "; it was expanded: clone it")
    if x.is_meta:
        raise ValueError(message("x", "a tensor that holds values", x))


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Return the tensors in groups of one dtype and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
