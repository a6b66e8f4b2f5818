"""Sharded models (FSDP2): each rank has a shard of every parameter, and rules on weights act on that.

The ranks that average with each other are those that hold the same shard: one dimension of a mesh, while FSDP shards
over another.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...comm import Comm, members_of
from ...rules import Rule


def is_sharded(p: Tensor) -> bool:
    """Return True if `p` is spread over ranks: a DTensor."""
    return hasattr(p, "to_local")


def is_divided(optimizer: Optimizer) -> bool:
    """Return True if each rank has the state of some parameters only: a ZeroRedundancyOptimizer."""
    return hasattr(optimizer, "consolidate_state_dict")


def reshard(model: nn.Module) -> None:
    """Reshard an FSDP2 model, whose parameters a forward may have left unsharded."""
    for _, module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the modules on which `fully_shard` has been called, by name."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # importing it takes seconds; a user of it has done so
    return [] if fsdp is None else [(name, m) for name, m in model.named_modules() if isinstance(m, fsdp.FSDPModule)]


def check_shards(rules: Sequence[Rule], names: dict[Tensor, str], comm: Comm) -> None:
    """Raise a TypeError or ValueError if a parameter is sharded and the rules cannot act on shards."""
    sharded: list[Any] = [p for p in names if is_sharded(p)]
    if not sharded:
        return
    if comm.membership is not None:
        raise ValueError("the shards of a sharded model go with a rank that is lost; bk.elastic takes whole models")
    for rule in rules:
        if rule.what == "grad":
            raise TypeError(
                f"{rule!r} acts on gradients, and those of a sharded model are reduced by FSDP; "
                f"use bk.interop.fsdp(model, {rule.stage!r}), and attach for rules on weights"
            )
    ours = members_of(comm.group)
    for p in sharded:
        both = sorted(set(ours) & set(p.device_mesh.mesh.flatten().tolist()))
        if both != [dist.get_rank()]:
            raise ValueError(
                f"ranks {both} of this group hold shards of the same {names[p]}; shard within one dimension of a "
                'mesh and average over another: comm=bk.Comm(mesh.get_group("inter"))'
            )
