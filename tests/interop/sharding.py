"""The toy net under FSDP2, on a line or a grid of ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import net


def sharded(mesh, module=None):
    """The toy net in three FSDP modules: two layers, and what is left."""
    module = net() if module is None else module
    for layer in (module[0], module[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def full(module):
    """All weights, whole, on every rank."""
    return torch.cat([p.detach().full_tensor().flatten() for p in module.parameters()])


def grid():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra"))


def line():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("intra",))
