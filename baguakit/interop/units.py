"""The parameters that FSDP2 reduces together. No other module reads FSDP2's own objects.

torch documents how to hook a module, but neither the modules that share one reduction (`fully_shard([a, b])`) nor the
layout of parameters in the tensor that a hook gets. Both are read here, as torch 2.13 has them.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attach.setup.names import plain_names
from ..attach.setup.sharding import fsdp_modules
from ..comm import members_of


@dataclass(frozen=True, eq=False)
class Unit:
    """The parameters of one `fully_shard` call.

    Attributes:
        name: of the module, or the first of several.
        module: takes the hooks.
        group: the process group over which FSDP shards; ranks reduce and gather in it.
        replicated: FSDP averages over a second dimension of its mesh as well.
        names, shards: of every trainable parameter its name, and the shape of a rank's padded shard of it; a complex
            one is real pairs.
    """

    name: str
    module: Any
    group: Any
    replicated: bool
    names: tuple[str, ...]
    shards: tuple[torch.Size, ...]

    @property
    def ranks(self) -> list[int]:
        """Return the ranks over which it is sharded."""
        return members_of(self.group)

    def scattered(self) -> dict[Tensor, str]:
        """Return the layout of its scattered gradients: a stand-in without memory for each shard, and its name."""
        return {
            torch.empty(shape, dtype=torch.float32, device="meta"): name
            for name, shape in zip(self.names, self.shards, strict=True)
        }

    def unscattered(self) -> dict[Tensor, str]:
        """Return the layout before: the shards of the first rank, then those of the second, and so on."""
        n = len(self.ranks)
        return {shard: f"{name}[{r}/{n}]" for r in range(n) for shard, name in self.scattered().items()}


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
        state = module._get_fsdp_state()
        if id(state) in seen:  # one of several that were sharded together
            continue
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # earlier versions knew one mesh a module
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        if len(groups) > 1:
            raise ValueError(f"the parameters of {name or 'the model'} are sharded over {len(groups)} meshes; use one")
        if groups:
            units.append(_unit(name, module, groups[0], module_names, plain))
    if not units:
        raise TypeError(
            f"no module of this model, a {type(model).__name__}, has been given to torch.distributed.fsdp.fully_shard"
        )
    return units


def _unit(name: str, module: Any, group: Any, module_names: dict[nn.Module, str], plain: dict[str, str]) -> Unit:
    trainable = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    names = []
    for p in trainable:
        at = module_names[p._module_info.module]
        full = f"{at}.{p._module_info.param_name}" if at else p._module_info.param_name
        names.append(plain.get(full, full))
    shards = [torch.Size([*p.padded_sharded_param_size, *[2] * p.sharded_param.is_complex()]) for p in trainable]
    mesh = group.mesh_info
    shard_group = getattr(mesh, "shard_process_group", None)
    if shard_group is None:
        raise ValueError(f"{name or 'the model'} is replicated and not sharded; use bk.interop.ddp or bk.attach")
    replicated = getattr(mesh, "replicate_process_group", None) is not None
    return Unit(name, module, shard_group, replicated, tuple(names), tuple(shards))
