"""Steps and norms by device: CUDA tensors take the kernels, over tables that are kept; all others the definition."""

from collections.abc import Callable, Sequence

from torch import Tensor

from . import definition
from . import norm as norms
from .table import SUM_TILE, TILE, Kind, Plan, Plans, Role, key_of, listed, plan_of, written

PLANS = Plans()


def step_(
    rule: definition.Rule,
    roles: dict[str, Role],
    conditions: definition.Conditions,
    block: int | None,
    check: Callable[[], definition.Operands],
) -> None:
    """Step the tensors of the roles p, g, u, v, master.

    Args:
        rule: what the step is.
        roles: by the names of `table.FIELDS`, those that there are.
        conditions: what changes from step to step.
        block: of packed gradients; None if they are not.
        check: raises unless the tensors go together, and returns them as lists. Asked only where they are new.
    """
    if not listed(roles["p"])[0].is_cuda:
        definition.step_(rule, check(), conditions)
        return
    from . import launch

    launch.step_(rule, plan_for(roles, (block, conditions.key is not None), check), conditions, block)
    for name in roles.keys() & {"p", "master"}:
        written(roles[name])


def plan_for(roles: dict[str, Role], options: object, check: Callable[[], definition.Operands]) -> Plan:
    """The plan for tensors that lie where they lie; `options` is what else `check` looks at."""
    key = (options, *(key_of(name, role) for name, role in roles.items()))
    device = listed(roles["p"])[0].device
    plan = PLANS.find(key, device)
    if plan is None:
        operands = check()
        columns: dict[str, Sequence[Tensor | None]] = {"p": operands.p, "g": operands.g}
        columns |= dict(zip("uv", operands.states, strict=False))
        columns |= {"master": operands.master} if operands.master else {}
        plan = PLANS.keep(key, plan_of(_kinds(operands), columns, TILE))
    return plan


def _kinds(operands: definition.Operands) -> list[Kind]:
    masters = operands.master or [None] * len(operands.p)
    return [(p.dtype, g.dtype, m is not None) for p, g, m in zip(operands.p, operands.g, masters, strict=True)]


def gradient_norm_(norm: Tensor, grads: Role, found_inf: Tensor | None, check: Callable[[], Sequence[Tensor]]) -> None:
    """Write the norm of all gradients into `norm`, and whether it is not finite into `found_inf`."""
    if not norm.is_cuda:
        norms.gradient_norm_(norm, check(), found_inf)
        return
    from . import norm_gpu

    key = ("norm", key_of("g", grads))
    plan = PLANS.find(key, norm.device)
    if plan is None:
        tensors = check()
        plan = PLANS.keep(key, plan_of([(g.dtype, g.dtype, False) for g in tensors], {"g": tensors}, SUM_TILE))
    norm_gpu.gradient_norm_(norm, plan, found_inf)
