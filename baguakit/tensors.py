"""Tensors as memory: dense layouts, lists whose addresses do not change, and copies to devices."""

from collections.abc import Sequence
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

from .arguments import instance, several

_serial = count()


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`, without blocking the host."""
    # A copy from memory that is not pinned may wait for all earlier work of the stream. Dynamo cannot trace pinning.
    if x.is_cpu and device.type == "cuda" and not torch.compiler.is_compiling():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def is_dense(x: Tensor) -> bool:
    """Return whether the values of a tensor fill its memory without gaps or overlaps, in any order."""
    return x.is_contiguous() or x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).is_contiguous()


def sharing(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the places of tensors that are not empty, in groups: tensors whose ranges of memory overlap are in one."""
    spans, groups, reach = [], list[list[int]](), 0
    for i, x in enumerate(tensors):
        if x.numel():
            last = sum(step * (n - 1) for step, n in zip(x.stride(), x.shape, strict=True))
            spans.append((x.data_ptr(), x.data_ptr() + (1 + last) * x.itemsize, i))
    for begin, end, i in sorted(spans):
        if begin >= reach:
            groups.append([])
        groups[-1].append(i)
        reach = max(reach, end)
    return groups


class Fixed:
    """Tensors whose addresses do not change: the addresses are read once, and not at every step.

    You may write to the tensors, but not give them other memory (`.data =`, `set_`, `resize_`): steps would still use
    the old memory. Use `Fixed` for parameters and optimizer state; for gradients only if they are views of one bucket
    and are zeroed in place.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        listed = several("tensors", instance("tensors", tensors, Sequence, "a list of tensors"), "a list of tensors")
        self.tensors: tuple[Tensor, ...] = tuple(instance("each of tensors", x, Tensor, "a tensor") for x in listed)
        bases = (x if x._base is None else x._base for x in self.tensors)  # whose version their views share
        self.versions: tuple[Tensor, ...] = tuple({id(x): x for x in bases}.values())

    @cached_property
    def serial(self) -> int:
        """Return a unique number. The first read assigns it, outside of traced code: torch.compile could not."""
        return next(_serial)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"Fixed({len(self.tensors)} tensors)"


Role = Sequence[Any] | Fixed


def listed(role: Role) -> Sequence[Tensor]:
    return role.tensors if isinstance(role, Fixed) else role
