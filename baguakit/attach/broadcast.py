"""Take the model from one rank or from the exact mean of all ranks, and measure the distance from that mean."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from ..buckets import local, real
from ..comm import Comm
from ..runtime import broadcast_into, broadcast_tensors, reshard
from .setup import AttachSetup, is_divided, is_sharded


def take_from(source: int, setup: AttachSetup, comm: Comm) -> None:
    """Overwrite weights, buffers and optimizer state with those of rank `source`. Collective."""
    if comm.size > 1:
        broadcast_tensors([*setup.model.parameters(), *setup.model.buffers()], comm, setup.device, source)
        broadcast_optimizers(setup.optimizers, comm, setup.device, source)


def broadcast_optimizers(optimizers: Iterable[Optimizer], comm: Comm, device: torch.device, source: int = 0) -> None:
    """Overwrite the state of every optimizer, tensors and options, with that of rank `source`. Collective.

    The state is not overwritten if it is divided over the ranks.
    """
    for optimizer in optimizers:
        if is_divided(optimizer):
            continue
        tensors: list[Tensor] = []
        skeleton = tree_map_only(Tensor, partial(_placed, tensors=tensors), optimizer.state_dict())
        here = [(local(t).shape, t.dtype, t.device.type) for t in tensors]
        mine = (skeleton, here, any(map(is_sharded, tensors))) if comm.rank == source else None
        skeleton, shapes, sharded = comm.broadcast_object(mine, source)
        if sharded and here != shapes:
            raise ValueError(
                f"the optimizer state of a sharded model has other tensors on rank {comm.rank} than on rank {source}; "
                "attach before the first step, or load every rank's own checkpoint and pass broadcast=False"
            )
        if comm.rank != source and not sharded:
            tensors = [
                torch.empty(shape, dtype=dtype, device=device if kind == device.type else kind)
                for shape, dtype, kind in shapes
            ]
        for t in tensors:
            broadcast_into(t, comm, device, source)
        if comm.rank != source:
            restored = tree_map_only((_Place, _Parts), partial(_restored, tensors=tensors), skeleton)
            optimizer.load_state_dict(restored)


class _Place(int):
    """The number of a tensor that was taken out of a state."""


@dataclass(frozen=True)
class _Parts:
    """A tensor that consists of others, such as a quantized optimizer state, with the places of its parts."""

    kind: Any
    parts: dict[str, Any]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]


def _placed(tensor: Any, tensors: list[Tensor]) -> _Place | _Parts:
    """Append a tensor, or its parts, to `tensors`, and return the place."""
    if hasattr(tensor, "__tensor_flatten__") and not is_sharded(tensor):
        names, context = tensor.__tensor_flatten__()
        parts = {name: _placed(getattr(tensor, name), tensors) for name in names}
        return _Parts(type(tensor), parts, context, tensor.size(), tensor.stride())
    tensors.append(tensor.detach())
    return _Place(len(tensors) - 1)


def _restored(place: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(place, _Place):
        return tensors[place]
    parts = {name: _restored(each, tensors) for name, each in place.parts.items()}
    return place.kind.__tensor_unflatten__(parts, place.context, place.shape, place.stride)


CHUNK = 1 << 24  # values at a time, so that the fp32 copies stay small


@torch.no_grad()
def merge_(model: nn.Module, comm: Comm, device: torch.device) -> None:
    """Overwrite every parameter, and every dense non-integer buffer, with its mean over all ranks.

    The mean is computed in fp32, and in fp64 for fp64 tensors.
    """
    if comm.size == 1:
        return
    reshard(model)
    tensors = dict.fromkeys([*model.parameters(), *model.buffers()])
    floats = (local(x) for x in tensors if x.is_floating_point() or x.is_complex())
    for chunk in chunks(real(x) for x in floats if x.layout is torch.strided):
        exact = torch.float64 if any(x.dtype == torch.float64 for x in chunk) else torch.float32
        flat = torch.cat([x.to(device, exact).flatten() for x in chunk])
        comm.all_reduce(flat.div_(comm.size))
        for x, mean in zip(chunk, flat.split([x.numel() for x in chunk]), strict=True):
            x.copy_(mean.view(x.shape))


@torch.no_grad()
def consensus_distance(params: Iterable[Tensor], comm: Comm) -> float:
    """Return sqrt( (1/n) Σ_r ‖x_r − x̄‖² ), summed in fp64. In a sharded model, x_r are this rank's shards."""
    if comm.size == 1:
        return 0.0
    squares: Any = 0.0
    for chunk in chunks(real(local(p)) for p in params):
        x = torch.cat([p.flatten().double() for p in chunk])
        squares = squares + (x - comm.all_reduce(x / comm.size)).square().sum()
    return float((comm.all_reduce(squares) / comm.size).sqrt())


def chunks(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in lists of about `CHUNK` values."""
    held: list[Tensor] = []
    for x in tensors:
        if held and sum(h.numel() for h in held) + x.numel() > CHUNK:
            yield held
            held = []
        held.append(x)
    if held:
        yield held
