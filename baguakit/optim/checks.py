"""Checks of the tensors and numbers of optimizer steps, before anything is launched."""

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor

from ..arguments import describe, real
from ..kernels.steps.definition import Columns, Conditions
from ..tensors import is_dense, sharing

CPU = torch.device("cpu")
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


def check_columns(columns: Columns, names: dict[str, str], drawn: bool, packed: bool = False) -> Columns:
    """Return the columns if they fit each other. Errors call u and v by `names`. If `packed`, column g is not checked.

    Raises:
        TypeError: a tensor is not dense, or has a dtype that cannot be stepped (if `drawn`, with random rounding).
        ValueError: counts, sizes, layouts or devices differ, p[i] needs no master, or a written tensor shares memory.
    """
    weights, named = columns["p"], {}
    for name, column in ((names.get(at, at), columns[at]) for at in columns if at != "g" or not packed):
        if len(column) != len(weights):
            raise ValueError(f"{name} has {len(column)} tensors for {len(weights)} parameters: {describe(column)}")
        for i, (x, p) in enumerate(zip(column, weights, strict=True)):
            if x is not None or name != "master":
                x = named[f"{name}[{i}]"] = _dense(f"{name}[{i}]", x, WEIGHTS if name in "pg" else (torch.float32,))
                _check_like(f"{name}[{i}]", x, p)
    for i, p in enumerate(weights):
        mastered = f"master[{i}]" in named
        if p.device != weights[0].device:
            raise ValueError(f"p[{i}] is on {p.device} and p[0] on {weights[0].device}; step each device by itself")
        if mastered and p.dtype == torch.float32:
            raise ValueError(f"p[{i}] is float32 and needs no master; put None in its place")
        if mastered and drawn:
            raise ValueError(f"p[{i}] has a master, which loses nothing to rounding; leave key= out, or the master")
        if drawn and p.dtype == torch.float16:
            raise TypeError(f"p[{i}] is float16, and only bfloat16 is rounded at random; give it a master instead")
    names_of = [*named]
    for group in ([names_of[i] for i in group] for group in sharing([*named.values()]) if len(group) > 1):
        for one in (name for name in group if not name.startswith("g[")):  # gradients are only read
            other = next(each for each in group if each != one and len(sharing([named[one], named[each]])) == 1)
            raise ValueError(f"{one} and {other} share memory, and one is overwritten; clone one, or give it only once")
    return columns


def check_gradients(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients if one norm can be taken of all gradients; else raise."""
    for i, g in enumerate(grads):
        _dense(f"grads[{i}]", g, WEIGHTS)
        if g.device != grads[0].device:
            raise ValueError(f"grads[{i}] is on {g.device} and grads[0] on {grads[0].device}; take a norm for each")
    return grads


def check_conditions(conditions: Conditions, device: torch.device) -> None:
    """Raise unless the conditions of a step are valid for tensors on this device."""
    for name in ("lr", "clip", "grad_scale", "found_inf"):
        check_number(name, getattr(conditions, name), device, 0.0 if name in ("lr", "clip") else -inf)
    taken = conditions.taken
    if isinstance(taken, Tensor) and (taken.numel() != 1 or taken.device not in (device, CPU) or taken.is_complex()):
        raise ValueError(f"step is a number or a tensor with one value on {device}, not {describe(taken)}")


def check_number(name: str, number: object, device: torch.device, least: float = -inf) -> None:
    """Raise unless this is a finite number, or a floating tensor with one value that can be read without waiting."""
    if not isinstance(number, Tensor):
        real(name, number, least, above=0 if name == "grad_scale" else -inf)
    elif number.numel() != 1 or not number.is_floating_point() or number.device not in (device, CPU):
        raise ValueError(f"{name} is a floating tensor with one value on {device}, not {describe(number)}")


def _dense(name: str, x: object, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return `x` if it is a dense tensor of one of the dtypes; else raise."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; give tensors, and leave out parameters without a gradient")
    if x.layout is not torch.strided:
        raise TypeError(f"{name} has the layout {x.layout}; call .to_dense() first")
    if x.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} is {x.dtype}, and must be {allowed}; convert it with .to(…)")
    if not is_dense(x):
        raise TypeError(f"{name} has gaps (shape {tuple(x.shape)}, strides {x.stride()}); call .contiguous() first")
    return x


def _check_like(name: str, x: Tensor, p: Tensor) -> None:
    if x.device != p.device:
        raise ValueError(f"{name} is on {x.device} and its parameter on {p.device}; move one to the other")
    if x.numel() != p.numel():
        raise ValueError(f"{name} has {x.numel()} values and its parameter {p.numel()}: {describe(x)}, {describe(p)}")
    if not (x.is_contiguous() and p.is_contiguous()) and (x.shape, x.stride()) != (p.shape, p.stride()):
        raise ValueError(f"{name} has strides {x.stride()}, its parameter {p.stride()}; use torch.empty_like(p)")
