"""Steps and norms by device: CUDA tensors take the kernels, over tables that are kept; all others the definition."""

from collections.abc import Callable, Sequence
from operator import itemgetter

import torch
from torch import Tensor

from ...arguments import describe, real
from . import definition
from .definition import Conditions, Operands, Update
from .table import SUM_TILE, TILE, Role, StepTables, TableCache, key_of, listed, tables_of, written

TABLES = TableCache()


def step_(
    update: Update,
    roles: dict[str, Role],
    conditions: Conditions,
    block: int | None,
    check: Callable[[], Operands],
) -> None:
    """Step the tensors of the roles p, g, u, v, master.

    Args:
        update: what the step is.
        roles: by the names of `table.FIELDS`, those that there are.
        conditions: what changes from step to step.
        block: of packed gradients; None if they are not.
        check: raises unless the tensors go together, and returns them as lists. Asked only where they are new.
    """
    if not listed(roles["p"])[0].is_cuda:
        definition.step_(update, check(), conditions)
        return
    from . import gpu

    gpu.step_(update, tables_for(roles, (block, conditions.key is not None), check), conditions, block)
    for name in roles.keys() & {"p", "master"}:
        written(roles[name])


def tables_for(roles: dict[str, Role], options: object, check: Callable[[], Operands]) -> StepTables:
    """Return the tables of tensors at their addresses; `options` are further arguments of `check`."""
    key = (options, *(key_of(name, role) for name, role in roles.items()))
    device = listed(roles["p"])[0].device
    tables = TABLES.find(key, device)
    if tables is None:
        operands = check()
        masters = operands.master or [None] * len(operands.p)
        kinds = [(p.dtype, g.dtype, m is not None) for p, g, m in zip(operands.p, operands.g, masters, strict=True)]
        tables = TABLES.keep(key, tables_of(kinds, operands.columns("uv"), TILE))
    return tables


def gradient_norm_(norm: Tensor, grads: Role, found_inf: Tensor | None, check: Callable[[], Sequence[Tensor]]) -> None:
    """Write the norm of all gradients into `norm`, and whether it is not finite into `found_inf`."""
    if not norm.is_cuda:
        definition.gradient_norm_(norm, check(), found_inf)
        return
    from . import gpu

    key = ("norm", key_of("g", grads))
    tables = TABLES.find(key, norm.device)
    if tables is None:
        tensors = check()
        tables = TABLES.keep(key, tables_of([(g.dtype, g.dtype, False) for g in tensors], {"g": tensors}, SUM_TILE))
    gpu.gradient_norm_(norm, tables, found_inf)


# Checks, made before anything is launched, where tensors are new.

CPU = torch.device("cpu")
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)


def check_operands(operands: Operands, names: Sequence[str], drawn: bool, packed: bool = False) -> Operands:
    """Return the tensors, if they go together.

    Args:
        operands: what is to be stepped.
        names: what its states are called.
        drawn: whether bf16 weights are rounded at random.
        packed: whether gradients are packed, and so were looked at by themselves.

    Raises:
        TypeError: a tensor is not dense, or has a dtype that cannot be stepped.
        ValueError: numbers, sizes, layouts or devices differ, or what is written shares memory with another.
    """
    columns = operands.columns(names)
    if packed:
        del columns["g"]
    for name, column in columns.items():
        if len(column) != len(operands.p):
            raise ValueError(
                f"{len(operands.p)} parameters need as many tensors {name}, not {len(column)}: {describe(column)}"
            )
        for i, (x, p) in enumerate(zip(column, operands.p, strict=True)):
            if x is not None or name != "master":
                dtypes = WEIGHTS if name in "pg" else (torch.float32,)
                _check_like(_checked(f"{name}[{i}]", x, dtypes), f"{name}[{i}]", p)
    _check_masters(operands, drawn)
    _check_apart({f"{name}[{i}]": x for name, column in columns.items() for i, x in enumerate(column) if x is not None})
    return operands


def check_gradients(grads: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients, if a norm can be taken of all these together."""
    for i, g in enumerate(grads):
        _checked(f"grads[{i}]", g, WEIGHTS)
        if g.device != grads[0].device:
            raise ValueError(f"grads[{i}] is on {g.device} and grads[0] on {grads[0].device}; take a norm for each")
    return grads


def check_conditions(conditions: Conditions, device: torch.device) -> None:
    """Raise unless the numbers have a meaning for tensors on this device."""
    for name in ("lr", "clip", "grad_scale", "found_inf"):
        check_number(name, getattr(conditions, name), device, 0.0 if name in ("lr", "clip") else None)
    taken = conditions.taken
    if isinstance(taken, Tensor) and (taken.numel() != 1 or taken.device not in (device, CPU) or taken.is_complex()):
        raise ValueError(f"step is a number or a tensor with one value on {device}, not {_words(taken)}")


def check_number(name: str, number: object, device: torch.device, least: float | None = None) -> None:
    """Raise unless this is a finite number, or a floating tensor with one value that can be read without waiting."""
    if isinstance(number, Tensor):
        if number.numel() != 1 or not number.is_floating_point() or number.device not in (device, CPU):
            raise ValueError(f"{name} is a floating tensor with one value on {device}, not {_words(number)}")
    else:
        real(name, number, least, above=0 if name == "grad_scale" else None)


def _words(x: Tensor) -> str:
    return f"{tuple(x.shape)} of {x.dtype} on {x.device}"


def _checked(name: str, x: object, dtypes: Sequence[torch.dtype]) -> Tensor:
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


def _check_like(x: Tensor, name: str, p: Tensor) -> None:
    if x.device != p.device:
        raise ValueError(f"{name} is on {x.device} and its parameter on {p.device}; move one to the other")
    if x.numel() != p.numel():
        raise ValueError(
            f"{name} has {x.numel()} values and its parameter p {p.numel()}: {describe(x)} beside {describe(p)}"
        )
    if not (x.is_contiguous() and p.is_contiguous()) and (x.shape, x.stride()) != (p.shape, p.stride()):
        raise ValueError(
            f"{name} lies in memory otherwise than its parameter (strides {x.stride()} and {p.stride()}); "
            "make it with torch.empty_like(p)"
        )


def _check_masters(operands: Operands, drawn: bool) -> None:
    for i, p in enumerate(operands.p):
        mastered = bool(operands.master) and operands.master[i] is not None
        if p.device != operands.p[0].device:
            raise ValueError(f"p[{i}] is on {p.device} and p[0] on {operands.p[0].device}; step each device by itself")
        if mastered and p.dtype == torch.float32:
            raise ValueError(f"p[{i}] is float32 and needs no master; put None in its place")
        if mastered and drawn:
            raise ValueError(f"p[{i}] has a master, which loses nothing to rounding; leave key= out, or the master")
        if drawn and p.dtype == torch.float16:
            raise TypeError(f"p[{i}] is float16, and only bfloat16 is rounded at random; give it a master instead")


def is_dense(x: Tensor) -> bool:
    """Return whether the values of a tensor fill its memory without gaps or overlaps, in any order."""
    return x.is_contiguous() or x.permute(sorted(range(x.dim()), key=x.stride, reverse=True)).is_contiguous()


def _check_apart(tensors: dict[str, Tensor]) -> None:
    """Raise if one shares memory with another; two gradients may, since they are only read."""
    spans = [(x.data_ptr(), x.data_ptr() + x.nbytes, name) for name, x in tensors.items() if x.numel()]
    reach = {True: (0, ""), False: (0, "")}  # how far those read, and written, have come
    for start, stop, name in sorted(spans, key=itemgetter(0)):
        read = name.startswith("g[")
        for other in (False,) if read else (False, True):
            if start < reach[other][0]:
                raise ValueError(
                    f"{name} and {reach[other][1]} share memory, and one of them is overwritten; clone one, and "
                    "give a shared parameter once"
                )
        reach[read] = max(reach[read], (stop, name))
