"""The launchers of `cpu.c`, which has the arithmetic of `definition.py` for CPUs: the same bits, in the same tables."""

from ctypes import c_float

import torch
from torch import Tensor

from .. import cpu
from .definition import SGD, Adam, Conditions, Lion, Update, decay_of, numbers_of
from .operators import FIELDS, StepTables

RULES = (SGD, Adam, Lion)


def step_(update: Update, tables: StepTables, conditions: Conditions, block: None = None) -> None:
    """Step all tensors of the tables. Gradients are not packed: on a CPU, `optim/steps.py` decompresses them."""
    if float(conditions.found_inf) != 0:
        return
    values, factor, seed = numbers_of(update, conditions)
    numbers = (c_float * 8)(*values, *(0.0,) * (7 - len(values)), factor)
    rule, nesterov = RULES.index(type(update)), getattr(update, "nesterov", False)
    for (p, g, _), (tiles, records) in tables.by_kind.items():
        drawn = conditions.key is not None and p == torch.bfloat16
        kinds = rule, decay_of(update), nesterov, cpu.DTYPES.index(p), cpu.DTYPES.index(g), drawn
        cpu.call("steps", "step", tiles, records, len(tiles), *kinds, numbers, *seed, _threads(records))
    if isinstance(conditions.taken, Tensor):
        conditions.taken.add_(1)


def gradient_norm_(norm: Tensor, tables: StepTables, found_inf: Tensor | None) -> None:
    """Write the gradients' norm to `norm`. Set `found_inf`, if given, to 1 if the norm is not finite, else to 0."""
    first = 0
    for (_, g, _), (tiles, records) in tables.by_kind.items():
        into = tables.partials[first:]
        cpu.call("steps", "squares", tiles, records, len(tiles), cpu.DTYPES.index(g), into, _threads(records))
        first += len(tiles)
    norm.copy_(tables.partials.sum().sqrt())
    if found_inf is not None:
        found_inf.copy_(~norm.isfinite())


def _threads(records: Tensor) -> int:
    return cpu.threads(int(records[:, FIELDS.index("length")].sum()))
