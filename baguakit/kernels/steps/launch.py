"""The launchers of optimizer steps: a launch for each kind of tensors, and one before it for numbers on the device."""

from typing import Any

import torch
from torch import Tensor

from ..shared.gpu import on, signed, signed_words
from .definition import SGD, Adam, Conditions, Update, numbers_of
from .gpu import COUPLED, DECOUPLED, TYPES, step_kernel
from .numbers_gpu import numbers_kernel
from .table import StepTables, Table

WARPS = 4  # eight values a thread: Adam, with four streams, then needs about a hundred registers


def step_(update: Update, tables: StepTables, conditions: Conditions, block: int | None = None) -> None:
    """Step all tensors of the tables; `block` is that of packed gradients."""
    c, device = conditions, tables.numbers.device
    found = (c.lr, c.taken, c.grad_scale, c.clip, c.found_inf)
    held = [x if isinstance(x, Tensor) and x.device == device else None for x in found]  # the others are on the host
    if held[-1] is None and float(conditions.found_inf) != 0:
        return
    constants = {"RULE": type(update).__name__, "DECAY": _decay(update)}
    with on(device):
        numbers: tuple[Any, ...] = (tables.numbers, *(0.0,) * 8, 0, 0)
        if any(x is not None for x in held):
            _launch_numbers(update, tables, conditions, held, constants)
        else:
            values, factor, seed = numbers_of(update, conditions)
            numbers = (None, *values, *(0.0,) * (7 - len(values)), factor, *map(signed, seed))
        constants |= {"NESTEROV": isinstance(update, SGD) and update.nesterov, "STATES": update.states, "BLOCK": block}
        for table in tables.by_kind:
            _launch(table, numbers, constants, conditions.key is not None)
    if isinstance(conditions.taken, Tensor) and held[1] is None:
        conditions.taken.add_(1)


def _launch(table: Table, numbers: tuple[Any, ...], constants: dict[str, Any], drawn: bool) -> None:
    p, g, mastered = table.kind
    if len(table.tiles):
        step_kernel[(len(table.tiles),)](
            table.tiles, table.records, *numbers, **constants,
            P=TYPES[p], G=TYPES[g], MASTER=mastered, DRAWN=drawn and p == torch.bfloat16, TILE=table.tile,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _launch_numbers(
    update: Update, tables: StepTables, conditions: Conditions, held: list[Tensor | None], constants: dict[str, Any]
) -> None:
    c = conditions
    found = zip((c.lr, c.taken, c.grad_scale, c.clip), held, strict=False)
    lr, taken, scale, clip = (float(x) if there is None else 0.0 for x, there in found)
    numbers_kernel[(1,)](
        tables.numbers, *held, lr, int(taken), scale, clip, *_options(update), *signed_words(c.key or 0),
        **constants, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _options(update: Update) -> tuple[float, float, float, float]:
    if isinstance(update, SGD):
        return update.momentum, update.dampening, update.weight_decay, 0.0
    if isinstance(update, Adam):
        return update.beta1, update.beta2, update.eps, update.weight_decay
    return update.beta1, update.beta2, update.weight_decay, 0.0


def _decay(update: Update) -> int:
    if isinstance(update, Adam) and update.decoupled:
        return int(DECOUPLED.value)
    return int(COUPLED.value) if update.weight_decay else 0
