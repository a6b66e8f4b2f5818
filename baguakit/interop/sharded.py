"""Stages in FSDP2 (`torch.distributed.fsdp.fully_shard`), one hook for each FSDP module.

    comm: ranks with the same shards      gradients are scattered by FSDP, and then averaged by the stage over `comm`
    comm: None, or the shards' own group  gradients are scattered by the first half of the stage

The first is sharding within nodes and any stage between them. FSDP runs its reductions and their hooks on a stream of
their own: that stream waits for the flight of a hook, and backward continues. On a CPU backward waits.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..arguments import instance, message, truth
from ..comm import Comm, check_comm, check_device, members_of
from ..compressors import Compressor
from ..runtime import Setup, fsdp_modules, named, plain_names, reshard
from .handle import Handle, make_hook_setup, rules_on_gradients
from .sharded_lives import AcrossShards, WithinShards, check_scatter, hooked


def fsdp(
    model: nn.Module,
    stage: Any,
    comm: Comm | None = None,
    *,
    weights: Compressor | None = None,
    broadcast: bool = True,
    scaler: Any = None,
    timeout: float | timedelta | None = None,
) -> Handle:
    """Let a stage average the gradients of an FSDP2 model.

        mesh = init_device_mesh("cuda", (nodes, ranks_of_a_node), mesh_dim_names=("inter", "intra"))
        fully_shard(model, mesh=mesh["intra"])
        handle = bk.interop.fsdp(model, bk.stages.CompressedMean(), comm=bk.Comm(mesh.get_group("inter")))

    Collective. What a stage remembers of each module is its own. `set_requires_gradient_sync(False)` accumulates
    gradients without reducing them, as before.

    Args:
        model: a model whose modules have been given to `fully_shard`, on one mesh dimension.
        stage: with `comm` any stage, or algorithm on gradients such as `bk.algorithms.power_sgd()`; without it
            `Mean()`, `CompressedMean()` or `ErrorFeedback(CompressedMean())`: a quarter of the bytes of FSDP.
        comm: the ranks that hold the same shards; None means those over which FSDP shards.
        weights: a compressor of the weights that FSDP gathers (only without `comm`). Ranks then compute with weights
            that are alike, and rounded; the optimizer's own are not. A report has a row for each module's.
        broadcast: with `comm`, begin with the weights and buffers of its rank 0.
        scaler: the `ShardedGradScaler` in use, so that stages see gradients without its factor.
        timeout: seconds (or a timedelta) after which a flight is given up and the rank at fault is named; None: 600.

    Returns:
        A `Handle`: `state_dict`, `load_state_dict`, `report`, `detach`.

    Raises:
        TypeError, ValueError: something cannot work, or ranks differ; on every rank.
    """
    instance("model", model, nn.Module, "an nn.Module")
    reshard(model)
    units = units_of(model)
    comm = Comm(units[0].group) if comm is None else comm
    check_comm(comm)
    across = members_of(comm.group) != units[0].ranks
    layouts = [unit.layout(scattered=across) for unit in units]

    def make() -> Setup:
        truth("broadcast", broadcast)
        rules = rules_on_gradients(stage)
        device = next(model.parameters()).device
        check_device(comm.group, device)
        check_units(units, comm, across)
        if weights is not None and (across or not isinstance(weights, Compressor)):
            wanted = "a compressor such as MinMaxUInt8(), and only without comm="
            raise TypeError(message("weights", wanted, weights))
        for rule in rules:
            rule.stage.check(comm)
            if not across:
                check_scatter(rule.stage)
        names = {shard: name for layout in layouts for shard, name in layout.items()}
        frozen = [name for p, name in named(model).items() if not p.requires_grad]
        lines = [f"weights={weights!r}", *(f"{name} {tuple(shard.shape)}" for shard, name in names.items())]
        return make_hook_setup(rules, names, frozen, device, timeout, scaler, lines)

    hooks = [(unit.name, unit.module, list(layout)) for unit, layout in zip(units, layouts, strict=True)]
    if across:
        return Handle(AcrossShards(make, comm, timeout, hooks, model if broadcast else None))
    return Handle(WithinShards(make, comm, timeout, hooks, weights))


@dataclass(frozen=True, eq=False)
class Unit:
    """The parameters of one `fully_shard` call, which FSDP2 reduces together.

    No other part of this package reads FSDP2's own objects: torch documents how to hook a module, but neither the
    modules that share one reduction (`fully_shard([a, b])`) nor the layout of parameters in the tensor that a hook
    gets. Both are read here, as torch 2.13 has them.

    Attributes:
        name: of the module, or the first of several.
        module: takes the hooks.
        group: the process group over which FSDP shards; ranks reduce and gather in it.
        replicated: FSDP averages over a second dimension of its mesh as well.
        shards: of every trainable parameter its name, and the shape of a rank's padded shard of it; a complex one is
            real pairs.
    """

    name: str
    module: Any
    group: Any
    replicated: bool
    shards: tuple[tuple[str, torch.Size], ...]

    @property
    def ranks(self) -> list[int]:
        """Return the ranks over which it is sharded."""
        return members_of(self.group)

    def layout(self, scattered: bool) -> dict[Tensor, str]:
        """Return stand-ins without memory for the shards in a tensor of gradients, in order, and their names.

        The layout before scattering: all shards of the first rank, then all shards of the second, and so on.
        """
        n = 1 if scattered else len(self.ranks)
        return {
            torch.empty(shape, dtype=torch.float32, device="meta"): name if scattered else f"{name}[{r}/{n}]"
            for r in range(n)
            for name, shape in self.shards
        }


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model, in the order of its modules.

    Raises:
        TypeError: `fully_shard` has not been called on any of its modules.
        ValueError: a module's parameters are sharded over several meshes.
    """
    units, seen = [], set()
    module_names = {module: name for name, module in model.named_modules()}
    plain = plain_names([name for name, _ in model.named_parameters()])
    for name, module in fsdp_modules(model):
        state, whose = module._get_fsdp_state(), name or "the model"
        if id(state) in seen:  # one of several that were sharded together
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # earlier versions knew one mesh a module
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        if len(groups) > 1:
            raise ValueError(f"the parameters of {whose} are sharded over {len(groups)} meshes; use one")
        for group in groups:
            shards = []
            for p in (p for p in group.fsdp_params if p.sharded_param.requires_grad):
                full = f"{module_names[p._module_info.module]}.{p._module_info.param_name}".removeprefix(".")
                pairs = [2] if p.sharded_param.is_complex() else []
                shards.append((plain.get(full, full), torch.Size([*p.padded_sharded_param_size, *pairs])))
            shard_group = getattr(group.mesh_info, "shard_process_group", None)
            if shard_group is None:
                raise ValueError(f"{whose} is replicated and not sharded; use bk.interop.ddp or bk.attach")
            replicated = getattr(group.mesh_info, "replicate_process_group", None) is not None
            units.append(Unit(name, module, shard_group, replicated, tuple(shards)))
    if not units:
        raise TypeError(
            f"no module of this model, a {type(model).__name__}, has been given to torch.distributed.fsdp.fully_shard"
        )
    return units


def check_units(units: list[Unit], comm: Comm, across: bool) -> None:
    """Raise a ValueError unless all units are sharded over one group, and `comm` is that or one across it."""
    first, ours = units[0], members_of(comm.group)
    for unit in units:
        if unit.ranks != first.ranks:
            raise ValueError(
                f"{unit.name} is sharded over the ranks {unit.ranks} and {first.name or 'the model'} over "
                f"{first.ranks}; call bk.interop.fsdp for each part of the model"
            )
        if unit.module in hooked:
            raise ValueError("this model has a stage already: call detach() on its handle before giving it another")
    both = sorted(set(ours) & set(first.ranks))
    if across and both != [dist.get_rank()]:
        raise ValueError(
            f"ranks {both} of this group hold shards of the same parameters; shard within one dimension of a mesh and "
            'average over another: comm=bk.Comm(mesh.get_group("inter"))'
        )
    if across and first.replicated:
        raise ValueError(
            "this model is sharded over a mesh of two dimensions, and FSDP averages over the first itself before any "
            'hook; shard over the second alone: fully_shard(module, mesh=mesh["intra"])'
        )
