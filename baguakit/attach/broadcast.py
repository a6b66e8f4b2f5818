"""Overwrite the model with the values of one rank or the mean of all ranks, and measure how far ranks differ."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass
from torch.utils._pytree import tree_map_only

from ..buckets import local, real, split
from ..comm import Comm
from ..flights import Weighing
from ..primitives import mean_
from ..runtime.agreement import broadcast_tensors, reshard
from .setup import AttachSetup, is_divided, is_sharded


def take_from(source: int, setup: AttachSetup, comm: Comm) -> None:
    """Overwrite weights, buffers and optimizer state with those of rank `source`. Collective."""
    if comm.size > 1:
        broadcast_tensors([*setup.model.parameters(), *setup.model.buffers()], comm, setup.device, source)
        broadcast_optimizers(setup.optimizers, comm, setup.device, source)


def broadcast_optimizers(optimizers: Iterable[Optimizer], comm: Comm, device: torch.device, source: int = 0) -> None:
    """Overwrite the state and options of optimizers with those of rank `source`; skip divided ones. Collective."""
    for optimizer in optimizers:
        if is_divided(optimizer):
            continue
        tensors: list[Tensor] = []
        emptied = tree_map_only(Tensor, partial(_emptied, tensors=tensors), optimizer.state_dict())
        here = [(local(t).shape, t.dtype, t.device.type == device.type) for t in tensors]
        mine = (emptied, here, any(map(is_sharded, tensors))) if comm.rank == source else None
        emptied, shapes, sharded = comm.broadcast_object(mine, source)
        if sharded and here != shapes:
            raise ValueError(
                f"the optimizer state of a sharded model has other tensors on rank {comm.rank} than on rank {source}; "
                "attach before the first step, or load every rank's own checkpoint and pass broadcast=False"
            )
        if here != shapes:
            tensors = [torch.empty(size, dtype=kind, device=device if there else "cpu") for size, kind, there in shapes]
        broadcast_tensors(tensors, comm, device, source)
        if comm.rank != source:
            optimizer.load_state_dict(tree_map_only(Tensor, partial(_filled, tensors=iter(tensors)), emptied))


def _emptied(x: Any, tensors: list[Tensor]) -> Any:
    """Append `x`, or the parts of a quantized `x`, to `tensors`. Return `x` without its values."""
    if not is_sharded(x) and is_traceable_wrapper_subclass(x):
        return transform_subclass(x, lambda _, part: _emptied(part, tensors))
    tensors.append(x.detach())
    return torch.empty_like(local(x), device="meta")


def _filled(x: Any, tensors: Iterator[Tensor]) -> Any:
    """Return `x`, a result of `_emptied`, with the next of `tensors` in place of each empty tensor."""
    if is_traceable_wrapper_subclass(x):
        return transform_subclass(x, lambda _, part: _filled(part, tensors))
    return next(tensors)


CHUNK = 1 << 26  # bytes at a time, so that the copies in fp32 or fp64 stay small


@torch.no_grad()
def merge_(model: nn.Module, comm: Comm, device: torch.device) -> None:
    """Overwrite every parameter and dense non-integer buffer with its mean over all ranks, computed in fp32 or fp64."""
    if comm.size == 1:
        return
    reshard(model)
    tensors = dict.fromkeys([*model.parameters(), *model.buffers()])
    floats = (local(x) for x in tensors if x.is_floating_point() or x.is_complex())
    for chunk in split([real(x) for x in floats if x.layout is torch.strided], CHUNK):
        exact = torch.float64 if chunk[0].dtype == torch.float64 else torch.float32
        flat = torch.cat([x.to(device, exact).flatten() for x in chunk])
        comm.all_reduce(flat.div_(comm.size))
        for x, mean in zip(chunk, flat.split([x.numel() for x in chunk]), strict=True):
            x.copy_(mean.view(x.shape))


@torch.no_grad()
def consensus_distance(params: Iterable[Tensor], comm: Comm) -> float:
    """Return `Attachment.consensus_distance` of `params`, in fp64. A sharded parameter counts with its local shard."""
    if comm.size == 1:
        return 0.0
    squares: Any = 0.0
    for chunk in split([real(local(p)) for p in params], CHUNK):
        x = torch.cat([p.flatten().double() for p in chunk])
        squares = squares + (x - comm.all_reduce(x / comm.size)).square().sum()
    return float((comm.all_reduce(squares) / comm.size).sqrt())


@torch.no_grad()
def mean_gradients_(params: Sequence[Tensor], comm: Comm, weights: Weighing) -> None:
    """Average the gradients of `params`, uncompressed. A gradient that only some ranks have is zero on the others."""
    mine = torch.tensor([p.grad is not None for p in params], dtype=torch.uint8, device=params[0].device)
    used = comm.all_reduce(mine, dist.ReduceOp.MAX).tolist() if comm.size > 1 else []
    for p, somewhere in zip(params, used, strict=False):
        if somewhere and p.grad is None:
            p.grad = torch.zeros_like(p)
    mean_([p.grad for p in params if p.grad is not None], comm._with(_weights=weights()))
