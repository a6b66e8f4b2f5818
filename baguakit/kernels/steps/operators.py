"""Steps and norms by device: CUDA tensors take the kernels, over tables that are kept; all others the definition."""

from collections.abc import Callable, Sequence

from torch import Tensor

from . import definition
from .table import SUM_TILE, TILE, Role, StepTables, TableCache, key_of, listed, tables_of, written

TABLES = TableCache()


def step_(
    update: definition.Update,
    roles: dict[str, Role],
    conditions: definition.Conditions,
    block: int | None,
    check: Callable[[], definition.Operands],
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
    from . import launch

    launch.step_(update, tables_for(roles, (block, conditions.key is not None), check), conditions, block)
    for name in roles.keys() & {"p", "master"}:
        written(roles[name])


def tables_for(roles: dict[str, Role], options: object, check: Callable[[], definition.Operands]) -> StepTables:
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
    from . import norm_gpu

    key = ("norm", key_of("g", grads))
    tables = TABLES.find(key, norm.device)
    if tables is None:
        tensors = check()
        tables = TABLES.keep(key, tables_of([(g.dtype, g.dtype, False) for g in tensors], {"g": tensors}, SUM_TILE))
    norm_gpu.gradient_norm_(norm, tables, found_inf)
