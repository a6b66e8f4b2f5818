"""The launchers of `cpu.c`, which has the arithmetic of `definition.py` for CPUs: the same bits, in the same tables."""

from ctypes import c_float, c_int64, c_uint32, c_void_p
from typing import Any

import torch
from torch import Tensor

from .. import cpu
from .definition import SGD, Adam, Conditions, Lion, Update, decay_of, numbers_of
from .operators import C_FILE, FIELDS, StepTables

RULES = (SGD, Adam, Lion)


def step_(update: Update, tables: StepTables, conditions: Conditions, block: None = None) -> None:
    """Step all tensors of the tables. Gradients are not packed: on a CPU, `optim/steps.py` decompresses them."""
    if float(conditions.found_inf) != 0:
        return
    values, factor, seed = numbers_of(update, conditions)
    numbers = (c_float * 8)(*values, *(0.0,) * (7 - len(values)), factor)
    rule, nesterov = RULES.index(type(update)), getattr(update, "nesterov", False)
    for (p, g, _), table in tables.by_kind.items():
        drawn = conditions.key is not None and p == torch.bfloat16
        kinds = rule, decay_of(update), nesterov, cpu.DTYPES.index(p), cpu.DTYPES.index(g), drawn
        _library().step(*_places(*table), *kinds, numbers, *map(c_uint32, seed), _threads(table[1]))
    if isinstance(conditions.taken, Tensor):
        conditions.taken.add_(1)


def gradient_norm_(norm: Tensor, tables: StepTables, found_inf: Tensor | None) -> None:
    """Write the gradients' norm to `norm`. Set `found_inf`, if given, to 1 if the norm is not finite, else to 0."""
    first = 0
    for (_, g, _), table in tables.by_kind.items():
        partials = c_void_p(tables.partials[first:].data_ptr())
        _library().squares(*_places(*table), cpu.DTYPES.index(g), partials, _threads(table[1]))
        first += len(table[0])
    norm.copy_(tables.partials.sum().sqrt())
    if found_inf is not None:
        found_inf.copy_(~norm.isfinite())


def _library() -> Any:
    return cpu.functions(C_FILE)


def _threads(records: Tensor) -> int:
    return cpu.threads(int(records[:, FIELDS.index("length")].sum()))


def _places(tiles: Tensor, records: Tensor) -> tuple[Any, ...]:
    return c_void_p(tiles.data_ptr()), c_void_p(records.data_ptr()), c_int64(len(tiles))
