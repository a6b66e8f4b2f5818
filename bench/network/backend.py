"""Programs over the backend of torch.distributed, beside gloo: `python -m bench.network backend`.

DDP and FSDP2 train an MLP of 6 million values, of which next to nothing is computed; only the process group differs. A
step is the median of the slowest rank's; its quartiles stand beside it, and the bytes that the interfaces have counted.
The first steps, in which codecs are compiled, are not counted.

Formulas, of N values on n ranks, c(N) being the bytes of N packed values:

    DDP     an all-reduce of the gradients                        2 (n − 1)/n · 4 N, or 2 (n − 1) c(N/n)
    FSDP2   a reduce-scatter of the gradients, and two            3 (n − 1)/n · 4 N, or 3 (n − 1) c(N/n)
            all-gathers of the weights, for forward and backward; gloo makes its
            reduce-scatter of an all-reduce, and so sends a third more
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import baguakit as bk

from .contenders import BYTE
from .formulas import FP32, ring
from .train import counted, on_every_host, share, step

HOSTS, RATES, STEPS, WARM_UP = 4, ("100mbit", "500mbit"), 6, 2
WIDE, BATCH = 2410, 1
POLICY = bk.backend.Policy(BYTE)


def cells(quick: bool) -> list[dict[str, Any]]:
    """Return the cases to measure; quick: two steps at one rate."""
    return [{"hosts": HOSTS, "rate": rate, "steps": 2 if quick else STEPS} for rate in RATES[1 if quick else 0 :]]


def mlp() -> nn.Module:
    """Return the model: 6 million values, nearly all of them in one matrix."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 10))


def replicated(model: nn.Module, group: Any) -> nn.Module:
    """Return the model in DDP."""
    return DistributedDataParallel(model, process_group=group)


def sharded(model: nn.Module, group: Any) -> nn.Module:
    """Return the model in FSDP2, its large layer gathered by itself."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(str(group.name()).replace(":", "_"),))
    layers: Any = model
    fully_shard(layers[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


PROGRAMS: dict[str, tuple[Callable[[nn.Module, Any], nn.Module], int]] = {"DDP": (replicated, 2), "FSDP2": (sharded, 3)}
"""By name: how it wraps a model, and how often its step moves all values."""


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Both programs over both groups; every rank returns the same. Collective."""
    bk.backend.register(POLICY)
    groups = {"gloo": dist.group.WORLD, "bagua": dist.new_group(backend="bagua")}
    BYTE.warm_up("cpu")
    found = {
        f"{program}, {backend}": trained(wrap(mlp(), group), cell["steps"], moves, backend)
        for program, (wrap, moves) in PROGRAMS.items()
        for backend, group in groups.items()
    }
    found["compute"] = trained(mlp(), cell["steps"], 0, "gloo")
    dist.destroy_process_group(groups["bagua"])
    return found


def trained(model: nn.Module, steps: int, moves: int, backend: str) -> dict[str, Any]:
    """Train, and return times and bytes of a step. Collective."""
    comm = bk.Comm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(comm.rank)
    images, labels = torch.randn(BATCH, 64, generator=draw), torch.randint(10, (BATCH,), generator=draw)
    for _ in range(WARM_UP):
        step(model, optimizer, images, labels)
    dist.barrier()
    before, times, losses = counted(), [], []
    for _ in range(steps):
        began = time.perf_counter()
        losses.append(step(model, optimizer, images, labels))
        times.append(time.perf_counter() - began)
    dist.barrier()
    sent = (counted() - before).payload / steps / share(comm.size)
    every = comm.gather_objects({"times": times, "sent": sent, "losses": losses})
    slowest = list(map(max, *(each["times"] for each in every)))
    values = sum(p.numel() for p in mlp().parameters())
    shard = -(-values // comm.size)
    row = BYTE.row_bytes(shard) if backend == "bagua" else FP32 * shard
    return {
        "seconds": statistics.median(slowest),
        "quartiles": statistics.quantiles(slowest, n=4, method="inclusive"),
        "payload": statistics.mean(each["sent"] for each in every),
        "formula": moves * ring(comm.size) / 2 * comm.size * row,
        "loss": statistics.mean(each["losses"][-1] for each in every),
    }


if __name__ == "__main__":
    on_every_host(measure)
