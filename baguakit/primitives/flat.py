"""One flat tensor out of whatever the user has: a primitive is written for that and takes the rest through here."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Tensors = TypeVar("Tensors", Tensor, Sequence[Tensor])


def on_flat(primitive: Callable[..., Tensor]) -> Callable[..., Any]:
    """Let `primitive(x, …)`, written for a contiguous 1-D tensor, take any tensor or a list of tensors.

    A list travels as one message for each dtype and device in it. Tensors are overwritten in place and returned.
    """

    @wraps(primitive)
    @torch.no_grad()
    def wrapped(x: Any, *args: Any, **options: Any) -> Any:
        tensors = [x] if isinstance(x, Tensor) else list(x)
        for tensor in tensors:
            check_averageable(tensor)
        for alike in _alike(tensors):
            if len(alike) == 1 and alike[0].is_contiguous():
                primitive(alike[0].view(-1), *args, **options)
            else:
                flat = primitive(torch.cat([t.detach().flatten() for t in alike]), *args, **options)
                sizes = [t.numel() for t in alike]
                torch._foreach_copy_(alike, [p.view(t.shape) for p, t in zip(flat.split(sizes), alike, strict=True)])
        return x

    return wrapped


def check_averageable(x: Tensor) -> None:
    """Raise a TypeError unless `x` is a dense floating tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"expected a tensor or a list of tensors, and found {type(x).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"a tensor of dtype {x.dtype} cannot be averaged; convert it to a floating dtype first")
    if x.layout is not torch.strided:
        raise TypeError(f"a tensor of layout {x.layout} cannot be averaged; call .to_dense() first")


def _alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
