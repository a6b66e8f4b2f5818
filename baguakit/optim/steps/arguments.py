"""The arguments of optimizer steps: tensors or lists of them, and gradients as they came over the wire."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...arguments import instance, integer, real, said, several, shown
from ...compressors import MinMaxUInt8
from ...kernels.steps.table import Fixed, Role

Tensors = Tensor | Sequence[Tensor] | Fixed
Number = float | Tensor


def role_of(name: str, tensors: Any) -> Role:
    """Return one tensor as a list of it, and a list or a `Fixed` as it is. `name` is that of the argument."""
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    if isinstance(tensors, Fixed):
        return tensors
    listed = (
        tensors if isinstance(tensors, list | tuple) else several(name, tensors, "a tensor or a list of tensors", True)
    )
    for each in listed:
        if not isinstance(each, Tensor) and (each is not None or name != "master"):
            raise TypeError(
                said(name, "a tensor or a list of tensors", tensors) + "; leave out parameters without a gradient"
            )
        if name == "p" and each is not None and each.is_meta:
            raise ValueError(said(name, "a tensor that holds values", each))
    return listed


def check_options(key: int | None, found_inf: Any, step: Any, **numbers: Any) -> int | None:
    """Return the key if it is a whole number; raise unless the `numbers` are finite and 0 or more, and steps count.

    A skipped step would be counted wrongly if `found_inf` and `step` were on two devices.
    """
    if key is not None:
        key = integer("key", key, -(1 << 63), (1 << 63) - 1)
    if not isinstance(step, Tensor):
        integer("step", 0 if step is None else step, 0, (1 << 31) - 2)
    elif not torch.compiler.is_compiling() and step.is_cpu and step.numel() == 1 and not 0 <= step.item() < math.inf:
        raise ValueError(f"step is a whole number, 0 or more, not {step.item()} in {shown(step)}")
    for name, value in numbers.items():
        real(name, value, 0)
    if isinstance(found_inf, Tensor) and step is not None:
        where = step.device if isinstance(step, Tensor) else "the host"
        if where != found_inf.device:
            raise ValueError(
                f"found_inf is on {found_inf.device} and step on {where}, where a skipped step would be counted; give "
                "step in a tensor beside found_inf"
            )
    return key


def packed_row(packed: Tensor, compressor: MinMaxUInt8, p: Tensors) -> Tensor:
    """Return the gradients of p that `compressor` packed, as a step on CUDA reads them: (bytes,).

    Raises:
        TypeError: they are not bytes.
        ValueError: p is not one flat tensor, or they are not as many bytes as its gradients take.
    """
    instance("packed", packed, Tensor, "a tensor of bytes, as compress returned them")
    if not isinstance(p, Tensor) or not p.is_contiguous():
        raise ValueError("packed gradients are those of one contiguous tensor; step the flat tensor of a bucket")
    if packed.dtype != torch.uint8:
        raise TypeError(f"packed gradients are uint8, as compress returned them, not {packed.dtype}")
    size = compressor.row_bytes(p.numel())
    if packed.numel() != size or not packed.is_contiguous() or packed.device != p.device:
        raise ValueError(
            f"{compressor!r} packs {p.numel()} gradients in one contiguous row of {size} bytes on {p.device}, not in "
            f"{tuple(packed.shape)} on {packed.device}"
        )
    if packed.data_ptr() % 16:
        raise ValueError("packed gradients begin at an address that is no multiple of 16 bytes; clone them")
    return packed.view(-1)
