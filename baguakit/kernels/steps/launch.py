"""The launchers of optimizer steps: a launch for each kind of tensors, and one before it for numbers on the device."""

from typing import Any

import torch
from torch import Tensor

from ..shared.devices import on
from ..shared.noise_gpu import signed_words
from .definition import SGD, Adam, Conditions, Rule, numbers_of
from .gpu import COUPLED, DECOUPLED, TYPES, step_kernel
from .numbers_gpu import numbers_kernel
from .table import Plan, Table

WARPS = 4  # eight values a thread: Adam, with four streams, then needs about a hundred registers


def step_(rule: Rule, plan: Plan, conditions: Conditions, block: int | None = None) -> None:
    """Step all tensors of a plan; `block` is that of packed gradients."""
    held = held_by(plan.device, conditions)
    if held[-1] is None and float(conditions.found_inf) != 0:
        return
    constants = {"RULE": type(rule).__name__, "DECAY": _decay(rule)}
    with on(plan.device):
        numbers: tuple[Any, ...] = (plan.numbers, *(0.0,) * 8, 0, 0)
        if any(x is not None for x in held):
            _launch_numbers(rule, plan, conditions, held, constants)
        else:
            values, factor, seed = numbers_of(rule, conditions)
            numbers = (None, *values, *(0.0,) * (7 - len(values)), factor, *map(signed, seed))
        constants |= {"NESTEROV": isinstance(rule, SGD) and rule.nesterov, "STATES": rule.states, "BLOCK": block}
        for table in plan.tables:
            _launch(table, numbers, constants, conditions.key is not None)
    if isinstance(conditions.taken, Tensor) and held[1] is None:
        conditions.taken.add_(1)


def held_by(device: torch.device, conditions: Conditions) -> list[Tensor | None]:
    """Those of lr, taken, grad_scale, clip, found_inf that lie on the device; the others are on the host."""
    c = conditions
    values = (c.lr, c.taken, c.grad_scale, c.clip, c.found_inf)
    return [x if isinstance(x, Tensor) and x.device == device else None for x in values]


def _launch(table: Table, numbers: tuple[Any, ...], constants: dict[str, Any], drawn: bool) -> None:
    p, g, mastered = table.kind
    if len(table.tiles):
        step_kernel[(len(table.tiles),)](
            table.tiles, table.records, *numbers, **constants,
            P=TYPES[p], G=TYPES[g], MASTER=mastered, DRAWN=drawn and p == torch.bfloat16, TILE=table.tile,
            num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip


def _launch_numbers(
    rule: Rule, plan: Plan, conditions: Conditions, held: list[Tensor | None], constants: dict[str, Any]
) -> None:
    c = conditions
    on_host = [
        0.0 if there is not None else float(x)
        for x, there in zip((c.lr, c.taken, c.grad_scale, c.clip), held, strict=False)
    ]
    lr, taken, scale, clip = on_host
    numbers_kernel[(1,)](
        plan.numbers, *held, lr, int(taken), scale, clip, *_options(rule), *signed_words(c.key or 0),
        **constants, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def _options(rule: Rule) -> tuple[float, float, float, float]:
    if isinstance(rule, SGD):
        return rule.momentum, rule.dampening, rule.weight_decay, 0.0
    if isinstance(rule, Adam):
        return rule.beta1, rule.beta2, rule.eps, rule.weight_decay
    return rule.beta1, rule.beta2, rule.weight_decay, 0.0


def _decay(rule: Rule) -> int:
    if isinstance(rule, Adam) and rule.decoupled:
        return int(DECOUPLED.value)
    return int(COUPLED.value) if rule.weight_decay else 0


def signed(word: int) -> int:
    """A word of 32 bits as the signed integer of the same bits."""
    return word - (word >> 31 << 32)
