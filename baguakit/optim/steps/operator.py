"""The step of every optimizer, also as a torch operator, which `torch.compile` does not trace into."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...compressors import MinMaxUInt8
from ...kernels.steps import operators as steps_ops
from ...kernels.steps.check import check_conditions, check_operands
from ...kernels.steps.definition import SGD, Adam, Conditions, Lion, Operands, Update
from ...kernels.steps.table import Role, listed
from .arguments import Number, Tensors, packed_row, role_of

Masters = Tensors | Sequence[Tensor | None]


def step_(
    update: Update, p: Tensors, g: Tensors | None, states: dict[str, Tensors], master: Masters | None,
    conditions: Conditions, packed: Tensor | None = None, compressor: MinMaxUInt8 = MinMaxUInt8(),
) -> None:  # fmt: skip
    """Step the tensors p, overwriting them, their `states` and their masters.

    Args:
        update: the update.
        states: the state tensors, by their names in messages, in the order of the update.
        g, packed: the gradients; or None, and those of a flat p as `compressor` packed them.
        master: fp32 copies of parameters that are not.
        conditions: the numbers that change from step to step.
    """
    if torch.compiler.is_compiling():
        _step_in_graph(update, p, g, states, master, conditions, packed, compressor)
        return
    weights = role_of("p", p)
    if not len(weights):
        return
    first = listed(weights)[0]
    check_conditions(update, conditions, first.device)
    row = None if packed is None else packed_row(packed, compressor, p)
    if row is not None and not first.is_cuda:
        g, row = compressor.decompress(row.view(1, -1), first.numel()).view(first.shape), None
    roles: dict[str, Role] = {"p": weights, "g": role_of("g", g if row is None else row)}
    roles |= {at: role_of(name, state) for at, (name, state) in zip("uv", states.items(), strict=False)}
    if master is not None:
        roles["master"] = role_of("master", master)

    def check() -> Operands:
        lists = {name: listed(role) for name, role in roles.items()}
        remembered = tuple(lists[name] for name in "uv"[: len(states)])
        operands = Operands(lists["p"], lists["g"], remembered, lists.get("master", ()))
        check_operands(operands, list(states), conditions.key is not None, row is not None)
        return operands

    steps_ops.step_(update, roles, conditions, None if row is None else compressor.block, check)


# In a graph, lists are lists of tensors and numbers are tensors on the CPU, which a step reads without waiting.

UPDATES: dict[str, Any] = {kind.__name__: kind for kind in (SGD, Adam, Lion)}
OPTIONS = {name: tuple(each.name for each in fields(kind)) for name, kind in UPDATES.items()}


def _step_in_graph(
    update: Update, p: Tensors, g: Tensors | None, states: dict[str, Tensors], master: Masters | None,
    conditions: Conditions, packed: Tensor | None, compressor: MinMaxUInt8,
) -> None:  # fmt: skip
    options = [float(getattr(update, name)) for name in OPTIONS[type(update).__name__]]
    u, v = [*(_list(state) for state in states.values()), [], []][:2]
    masters = _list(master)
    c = conditions
    _operator(
        type(update).__name__, options, " ".join(states), _list(p), _list(g), u, v,
        [x for x in masters if x is not None], [x is not None for x in masters], _tensor(c.lr), _tensor(c.taken),
        _tensor(c.grad_scale), _tensor(c.clip), _tensor(c.found_inf), c.key, packed, compressor.block,
    )  # fmt: skip


def _list(tensors: Masters | None) -> list[Any]:
    return [] if tensors is None else list(listed(role_of("master", tensors)))


def _tensor(number: Number) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float64)


@torch.library.custom_op("baguakit::step_", mutates_args={"p", "u", "v", "master", "taken"})
def _operator(
    update: str, options: Sequence[float], names: str, p: Sequence[Tensor], g: Sequence[Tensor],
    u: Sequence[Tensor], v: Sequence[Tensor], master: Sequence[Tensor], mastered: Sequence[bool], lr: Tensor,
    taken: Tensor, grad_scale: Tensor, clip: Tensor, found_inf: Tensor, key: int | None, packed: Tensor | None,
    block: int,
) -> None:  # fmt: skip
    *numbers, switch = options
    kind = UPDATES[update]
    masters = iter(master)
    step_(
        kind(*options) if kind is Lion else kind(*numbers, bool(switch)),
        p if packed is None else p[0],
        g if packed is None else None,
        dict(zip(names.split(), (u, v), strict=False)),
        [next(masters) if there else None for there in mastered] if mastered else None,
        Conditions(lr, taken, grad_scale, clip, found_inf, key),
        packed,
        MinMaxUInt8(block),
    )
