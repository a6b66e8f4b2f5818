"""The agreement of ranks when they attach: they compare their plans, and take the model of rank 0."""

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..buckets import local
from ..comm import Comm
from ..lanes import CpuLane
from .errands import Errand, end
from .monitor import Monitor
from .sharding import is_sharded


class Described(Protocol):
    """A plan that can be compared with those of the other ranks."""

    def described(self) -> list[str]:
        """The plan in lines of text that must be the same on all ranks."""


AnyPlan = TypeVar("AnyPlan", bound=Described)


def agree(monitor: Monitor, make: Callable[[], AnyPlan], what: str = "attach()") -> AnyPlan:
    """Make this rank's plan, and compare it with the others' through the store, which needs no group.

    Rank 0 reads what all ranks have told, and tells them what it found. An error on one rank, or a difference between
    two, is raised on all; a rank that does not come is named when the timeout is over.
    """
    plan, told, error, found = None, [], None, ""
    errand = Errand(what, 0, monitor)
    launch = monitor.launched(0, errand)
    try:
        plan = make()
        told = plan.described()
    except Exception as caught:
        error = caught
    if monitor.size > 1:
        complaint = None if error is None else f"{type(error).__name__}: {error}"
        lane = CpuLane("baguakit agree")  # a store that stands still keeps a thread waiting, which is not joined
        errand.flight = lane.run(lambda: _compared(monitor, f"agree/{launch.count}", (complaint, told)), what)
        lane.close(wait=False)
        found = end(errand)
    else:
        monitor.landed(errand)
    if error is not None:
        raise error
    if found:
        raise ValueError(found)
    assert plan is not None
    return plan


def _compared(monitor: Monitor, key: str, told: tuple[str | None, list[str]]) -> str:
    """Tell the other ranks what this one says, and return what is wrong, as rank 0 sees it; "" for nothing."""
    store, mine = monitor.store, f"{key}/{monitor.rank}"
    keys, verdict = [f"{key}/{rank}" for rank in range(monitor.size)], f"{key}/verdict"
    store.set(mine, zlib.compress(json.dumps(told).encode()))
    if monitor.rank == 0:
        monitor.wait_until(lambda: bool(store.check(keys)))
        store.set(verdict, json.dumps(difference([json.loads(zlib.decompress(store.get(each))) for each in keys])))
    monitor.wait_until(lambda: bool(store.check([verdict])))
    store.delete_key(mine)
    return str(json.loads(store.get(verdict)))


def difference(told: Sequence[tuple[str | None, list[str]]]) -> str:
    """Return the sentence on the first rank that has an error, or says something else than rank 0; "" if none does."""
    for rank, (complaint, _) in enumerate(told):
        if complaint is not None:
            return f"rank {rank} could not attach: {complaint}"
    for rank, (_, lines) in enumerate(told):
        if lines != told[0][1]:
            ours, theirs = first_difference(told[0][1], lines)
            return f"ranks must attach the same: rank 0 has {ours} where rank {rank} has {theirs}"
    return ""


def first_difference(a: list[str], b: list[str]) -> tuple[str, str]:
    """The first lines in which two descriptions differ."""
    longest = max(len(a), len(b))
    a, b = a + ["nothing more"] * (longest - len(a)), b + ["nothing more"] * (longest - len(b))
    return next((x.strip(), y.strip()) for x, y in zip(a, b, strict=True) if x != y)


def take_from(source: int, plan: Any, comm: Comm) -> None:
    """Overwrite weights, buffers and optimizer state with those of rank `source`. Collective."""
    if comm.size > 1:
        broadcast_tensors([*plan.model.parameters(), *plan.model.buffers()], comm, plan.device, source)
        broadcast_optimizers(plan.optimizers, comm, plan.device, source)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, device: torch.device, source: int = 0) -> None:
    """Overwrite tensors, such as parameters and buffers, with those of rank `source`."""
    for x in dict.fromkeys(tensors):
        broadcast_into(local(x), comm, device, source)


def broadcast_into(x: Tensor, comm: Comm, device: torch.device, source: int = 0) -> None:
    """Overwrite `x`, wherever it lives and however it lies in memory, with that of `source`: bytes of any dtype."""
    if x.numel():
        there = x.to(device).contiguous()
        comm.broadcast(there.view(-1).view(torch.uint8), source)
        if there.data_ptr() != x.data_ptr():
            x.copy_(there)


def broadcast_optimizers(optimizers: Iterable[Optimizer], comm: Comm, device: torch.device, source: int = 0) -> None:
    """Load every optimizer with the state of rank `source`: its tensors and its options."""
    for optimizer in optimizers:
        state = optimizer.state_dict()
        tensors: list[Tensor] = []
        skeleton = _without_tensors(state, tensors)
        sharded = any(map(is_sharded, tensors))
        skeleton, shapes, sharded = _from(source, comm, (skeleton, [_shape(t) for t in tensors], sharded))
        if sharded and [_shape(t) for t in tensors] != shapes:
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
            broadcast_into(local(t), comm, device, source)
        if comm.rank != source:
            optimizer.load_state_dict(_with_tensors(skeleton, tensors))


def _shape(t: Tensor) -> tuple[torch.Size, torch.dtype, str]:
    return local(t).shape, t.dtype, t.device.type


def _from(source: int, comm: Comm, value: Any) -> Any:
    return comm.gather_objects(value if comm.rank == source else None)[source]


class _Place(int):
    """Where a tensor was, by its number."""


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return _Place(len(tensors) - 1)
    if isinstance(value, dict):
        return {key: _without_tensors(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_tensors(each, tensors) for each in value)
    return value


def _with_tensors(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _Place):
        return tensors[value]
    if isinstance(value, dict):
        return {key: _with_tensors(each, tensors) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_with_tensors(each, tensors) for each in value)
    return value
