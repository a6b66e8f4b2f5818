"""Tensors as memory: dense layouts, overlaps, and copies to devices."""

from collections.abc import Sequence

import torch
from torch import Tensor


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
