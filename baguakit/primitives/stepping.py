"""The step of every optimizer, and the same as an operator of torch, which `torch.compile` passes over."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..compressors import MinMaxUInt8
from ..kernels.steps import operators as steps_ops
from ..kernels.steps.check import check_conditions, check_operands
from ..kernels.steps.definition import SGD, Adam, Conditions, Lion, Operands, Rule
from ..kernels.steps.table import Role, listed
from .steps_arguments import Number, Tensors, packed_row, role_of

Masters = Tensors | Sequence[Tensor | None]


def step_(
    rule: Rule, p: Tensors, g: Tensors | None, states: dict[str, Tensors], master: Masters | None,
    conditions: Conditions, packed: Tensor | None = None, compressor: MinMaxUInt8 = MinMaxUInt8(),
) -> None:  # fmt: skip
    """Step the tensors p, overwriting them, their `states` and their masters.

    Args:
        rule: what the step is.
        states: what is remembered, by the names it has in messages, in the order of the rule.
        g, packed: the gradients; or None, and those of a flat p as `compressor` packed them.
        master: fp32 copies of parameters that are not.
        conditions: what changes from step to step.
    """
    if torch.compiler.is_compiling():
        _step_in_graph(rule, p, g, states, master, conditions, packed, compressor)
        return
    weights = role_of("p", p)
    if not len(weights):
        return
    device = listed(weights)[0].device
    check_conditions(rule, conditions, device)
    row = packed_row(packed, compressor, p)
    if row is not None and device.type != "cuda":
        g, row = row.unpacked(), None
    roles: dict[str, Role] = {"p": weights, "g": role_of("g", [row.row] if row else g)}
    roles |= {at: role_of(name, state) for at, (name, state) in zip("uv", states.items(), strict=False)}
    if master is not None:
        roles["master"] = role_of("master", master)

    def check() -> Operands:
        lists = {name: listed(role) for name, role in roles.items()}
        remembered = tuple(lists[name] for name in "uv"[: len(states)])
        operands = Operands(lists["p"], lists["g"], remembered, lists.get("master", ()))
        check_operands(operands, list(states), conditions.key is not None, row is not None)
        return operands

    steps_ops.step_(rule, roles, conditions, row.block if row else None, check)


# In a graph, lists are lists of tensors and numbers are tensors on the CPU, which a step reads without waiting.

RULES: dict[str, Any] = {kind.__name__: kind for kind in (SGD, Adam, Lion)}


def _step_in_graph(
    rule: Rule, p: Tensors, g: Tensors | None, states: dict[str, Tensors], master: Masters | None,
    conditions: Conditions, packed: Tensor | None, compressor: MinMaxUInt8,
) -> None:  # fmt: skip
    options = [float(value) for value in vars(rule).values()]
    u, v = [*(_list(state) for state in states.values()), [], []][:2]
    masters = _list(master)
    c = conditions
    _operator(
        type(rule).__name__, options, " ".join(states), _list(p), _list(g), u, v, [x for x in masters if x is not None],
        [x is not None for x in masters], _tensor(c.lr), _tensor(c.taken), _tensor(c.grad_scale), _tensor(c.clip),
        _tensor(c.found_inf), c.key, packed, compressor.block,
    )  # fmt: skip


def _list(tensors: Masters | None) -> list[Any]:
    return [] if tensors is None else list(listed(role_of("master", tensors)))


def _tensor(number: Number) -> Tensor:
    if isinstance(number, Tensor):
        return number
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else torch.float64)


@torch.library.custom_op("baguakit::step_", mutates_args={"p", "u", "v", "master", "taken"})
def _operator(
    rule: str, options: Sequence[float], names: str, p: Sequence[Tensor], g: Sequence[Tensor],
    u: Sequence[Tensor], v: Sequence[Tensor], master: Sequence[Tensor], mastered: Sequence[bool], lr: Tensor,
    taken: Tensor, grad_scale: Tensor, clip: Tensor, found_inf: Tensor, key: int | None, packed: Tensor | None,
    block: int | None,
) -> None:  # fmt: skip
    *numbers, switch = options
    kind = RULES[rule]
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
