"""Tensors as memory: dense layouts, overlaps, and copies to devices."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def uploaded(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`, without blocking the host."""
    # A copy from memory that is not pinned may wait for all earlier work of the stream. Dynamo cannot trace pinning.
    if x.is_cpu and device.type == "cuda" and not torch.compiler.is_compiling():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def plain(x: Tensor) -> Tensor:
    """Return x itself if it is contiguous and needs no conjugation or negation; otherwise such a copy of its values."""
    return x.resolve_conj().resolve_neg().contiguous()


def bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, as a view of it; raise a ValueError if `plain` does not return it itself."""
    if not x.is_contiguous() or x.is_conj() or x.is_neg():
        raise ValueError("only a contiguous tensor can be viewed as bytes; call .contiguous() or .resolve_conj() first")
    # Of a tensor with one value `view` keeps the stride, which may be any, and views as bytes need 1.
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


def is_dense(x: Tensor) -> bool:
    """Return whether the values of a tensor fill its memory without gaps or overlaps, in any order."""
    return x.is_contiguous() or x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).is_contiguous()


def span(x: Tensor) -> tuple[int, int]:
    """Return the addresses at which the memory of a tensor that is not empty begins and ends."""
    last = sum(step * (n - 1) for step, n in zip(x.stride(), x.shape, strict=True))
    return x.data_ptr(), x.data_ptr() + (1 + last) * x.itemsize


def sharing(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the places of tensors that are not empty, in groups: tensors whose ranges of memory overlap are in one."""
    spans = sorted((str(x.device), *span(x), i) for i, x in enumerate(tensors) if x.numel())
    groups, reach = list[list[int]](), ("", 0)
    for device, begin, end, i in spans:
        if (device, begin) >= reach:
            groups.append([])
        groups[-1].append(i)
        reach = max(reach, (device, end))
    return groups


def overlap(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the places of two tensors that have values in the same memory, or twice that of one which has; or None."""
    for group in sharing(tensors):
        if len(group) == 1 and is_dense(tensors[group[0]]):
            continue
        spans, grain = [span(tensors[i]) for i in group], min(tensors[i].itemsize for i in group)
        begin, end = min(begin for begin, _ in spans), max(end for _, end in spans)
        owners = torch.full(((end - begin) // grain,), -1, dtype=torch.int32)
        for i in group:
            x, grains = tensors[i], tensors[i].itemsize // grain
            if any(step == 0 and n > 1 for step, n in zip(x.stride(), x.shape, strict=True)):
                return i, i
            strides = *(step * grains for step in x.stride()), 1
            owner = owners.as_strided((*x.shape, grains), strides, (x.data_ptr() - begin) // grain)
            if (other := int(owner.max())) >= 0:
                return other, i
            owner.fill_(i)
            if int((owners == i).count_nonzero()) < owner.numel():
                return i, i
    return None


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return, by name, the first name of the same tensor: its values are in the same memory, in the same order."""
    first: dict[Any, str] = {}

    def place(x: Tensor) -> Any:
        return x.device, x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()

    return {name: first.setdefault(place(x) if x.numel() else name, name) for name, x in tensors.items()}


def check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if values of a tensor, or of two that are not the same tensor, are in the same memory."""
    apart = [*dict.fromkeys(first_names(tensors).values())]
    if pair := overlap([tensors[name] for name in apart]):
        one, other = (apart[i] for i in pair)
        x = tensors[one]
        alone = f"values of {one!r} share memory (shape {tuple(x.shape)}, strides {x.stride()})"
        both = alone if one == other else f"{one!r} and {other!r} share memory"
        raise ValueError(f"{both}, so that they cannot be written apart; pass a .contiguous() copy")
