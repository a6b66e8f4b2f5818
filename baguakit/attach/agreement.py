"""What ranks tell each other when they attach: that they mean the same, and what rank 0's model holds."""

import uuid
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..buckets import local
from ..comm import Comm
from .sharding import is_sharded


class Described(Protocol):
    """A plan that can be compared with those of the other ranks."""

    def described(self) -> list[str]:
        """The plan in lines of text that must be the same on all ranks."""


AnyPlan = TypeVar("AnyPlan", bound=Described)


def agree(comm: Comm, make: Callable[[], AnyPlan]) -> tuple[AnyPlan, str]:
    """Make this rank's plan, and compare it with the others' in one exchange.

    Returns the plan, and a name for the attachment that no other has. An error on one rank, or a difference between
    two, is raised on all.
    """
    plan, described, error = None, None, None
    try:
        plan = make()
        described = plan.described()
    except Exception as caught:
        error = caught
    told = (None if error is None else f"{type(error).__name__}: {error}", described, uuid.uuid4().hex)
    answers = comm.gather_objects(told)
    if error is not None:
        raise error
    assert plan is not None
    for rank, (complaint, _, _) in enumerate(answers):
        if complaint is not None:
            raise ValueError(f"rank {rank} could not attach: {complaint}")
    for rank, (_, described, _) in enumerate(answers):
        if described != answers[0][1]:
            ours, theirs = first_difference(answers[0][1], described)
            raise ValueError(f"ranks must attach the same: rank 0 has {ours} where rank {rank} has {theirs}")
    return plan, answers[0][2]


def first_difference(a: list[str], b: list[str]) -> tuple[str, str]:
    """The first lines in which two descriptions differ."""
    longest = max(len(a), len(b))
    a, b = a + ["nothing more"] * (longest - len(a)), b + ["nothing more"] * (longest - len(b))
    return next((x.strip(), y.strip()) for x, y in zip(a, b, strict=True) if x != y)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], comm: Comm, device: torch.device) -> None:
    """Overwrite tensors, such as parameters and buffers, with those of rank 0."""
    for x in dict.fromkeys(tensors):
        broadcast_into(local(x), comm, device)


def broadcast_into(x: Tensor, comm: Comm, device: torch.device) -> None:
    """Overwrite `x`, wherever it lives and however it lies in memory, with that of rank 0."""
    if x.numel():
        there = comm.broadcast(x.to(device).contiguous())
        if there.data_ptr() != x.data_ptr():
            x.copy_(there)


def broadcast_optimizers(optimizers: Iterable[Optimizer], comm: Comm, device: torch.device) -> None:
    """Load every optimizer with the state of rank 0: its tensors and its options."""
    for optimizer in optimizers:
        state = optimizer.state_dict()
        tensors: list[Tensor] = []
        skeleton = _without_tensors(state, tensors)
        sharded = any(map(is_sharded, tensors))
        skeleton, shapes, sharded = _from_first(comm, (skeleton, [_shape(t) for t in tensors], sharded))
        if sharded and [_shape(t) for t in tensors] != shapes:
            raise ValueError(
                f"the optimizer state of a sharded model has other tensors on rank {comm.rank} than on rank 0; "
                "attach before the first step, or load every rank's own checkpoint and pass broadcast=False"
            )
        if comm.rank != 0 and not sharded:
            tensors = [
                torch.empty(shape, dtype=dtype, device=device if kind == device.type else kind)
                for shape, dtype, kind in shapes
            ]
        for t in tensors:
            broadcast_into(local(t), comm, device)
        if comm.rank != 0:
            optimizer.load_state_dict(_with_tensors(skeleton, tensors))


def _shape(t: Tensor) -> tuple[torch.Size, torch.dtype, str]:
    return local(t).shape, t.dtype, t.device.type


def _from_first(comm: Comm, value: Any) -> Any:
    return comm.gather_objects(value if comm.rank == 0 else None)[0]


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
