"""Stages as the communication hook of `DistributedDataParallel`.

    DDP has filled a bucket → its flight is launched on the lane, in bucket order → it lands when backward ends

DDP asks its hook for a future of each bucket and continues with backward. So the stage overlaps backward, on a CUDA
stream or a thread. After the first backward DDP makes new buckets; each parameter keeps its part of a stage's state.
"""

import contextlib
import weakref
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ..arguments import message
from ..buckets import check_averaged, real
from ..comm import Comm, Weight, backend_of, check_comm, members_of
from ..runtime.agreement import Setup, as_time, named
from ..runtime.runtime import or_abandon
from .handle import Handle, HookLife, rules_on_gradients

if TYPE_CHECKING:
    GradBucket = Any  # torch leaves it without a type; at run time DDP asks for this very annotation
else:
    from torch.distributed import GradBucket


def ddp(
    ddp_model: DistributedDataParallel,
    stage: Any,
    comm: Comm | None = None,
    *,
    scaler: Any = None,
    timeout: float | timedelta | None = None,
    weight: Weight = None,
) -> Handle:
    """Let a stage average the gradients of a model in `DistributedDataParallel`, in place of DDP's all-reduce.

        handle = bk.interop.ddp(ddp_model, bk.stages.ErrorFeedback(bk.stages.CompressedMean()))

    Collective. DDP's `no_sync()`, `find_unused_parameters`, `static_graph` and `gradient_as_bucket_view` still work.
    DDP's `join()` does not work: a rank that has finished makes no exchanges. After `handle.detach()` DDP averages
    again. A `Handle` also has the methods `state_dict`, `load_state_dict` and `report`.

    Args:
        ddp_model: the wrapped model.
        stage: such as `bk.stages.CompressedMean()`; or an algorithm on gradients, such as `bk.algorithms.bytegrad()`.
        comm: a `Comm` of the model's process group; None makes this `Comm`. `Hierarchical` needs a `Comm(mesh=…)`,
            because only a mesh says which ranks are on one node.
        scaler: the GradScaler in use; the stage then gets unscaled gradients.
        timeout: seconds (or a timedelta) after which a flight fails and the rank at fault is named; None: 600.
        weight: as in `bk.attach`. A function is called once in each backward that averages.

    Raises:
        TypeError, ValueError: arguments cannot work together, or differ between ranks. Raised on every rank.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(message("ddp_model", "a DistributedDataParallel", ddp_model) + "; use bk.attach for others")
    group = ddp_model.process_group
    comm = Comm(group) if comm is None else comm
    check_comm(comm)

    def make() -> Setup:
        rules, plain = rules_on_gradients(stage), named(ddp_model.module)
        names = {p: name for p, name in plain.items() if p.requires_grad}
        for p, name in names.items():
            check_averaged(f"parameter {name}", p)
        if members_of(comm.group) != members_of(group):
            raise ValueError(f"comm= has the ranks {members_of(comm.group)}, not those of DDP: {members_of(group)}")
        if backend_of(group, (device := next(iter(names)).device).type) == "nothing":
            raise ValueError(
                f"DDP itself sends tensors on {device}, and its process group has no backend for them; use bk.attach "
                "without DDP, or call bk.backend.register() and make the group with the backend 'bagua'"
            )
        if _lives.get(ddp_model) is not None:
            raise ValueError("this model has a stage already: call detach() on its handle before giving it another")
        frozen = tuple(name for p, name in plain.items() if not p.requires_grad)
        lines = tuple(f"{name} {tuple(p.shape)} {p.dtype}" for p, name in names.items())
        return Setup(rules, names, frozen, device, as_time(timeout), scaler, lines, weight=weight)

    return Handle(DataParallelLife(make, comm, timeout, ddp_model))


class DataParallelLife(HookLife):
    def __init__(self, make: Any, comm: Comm, timeout: Any, ddp_model: DistributedDataParallel) -> None:
        self.futures: list[tuple[Future[Tensor], Tensor]] = []  # of the buckets of a backward
        super().__init__(make, comm, timeout)
        with or_abandon(self):
            if ddp_model not in _lives:
                ddp_model.register_comm_hook(weakref.ref(ddp_model), average)
            _lives[ddp_model] = self
            self.unhook.callback(_lives.update, {ddp_model: None})

    def fly(self, bucket: GradBucket) -> Future[Tensor]:
        """Launch a bucket that DDP has filled, and return its future."""
        flat, i = bucket.buffer(), bucket.index()
        if flat.layout is not torch.strided:
            raise TypeError("a sparse gradient cannot travel in a bucket; use sparse=False in the embedding")
        runner = self.begin()
        future: Future[Tensor] = Future(devices=[flat.device]) if flat.is_cuda else Future()
        if i == 0:
            self.futures = []
        self.futures.append((future, flat))
        if runner is None:
            settle(future, flat)
            return future

        def landed(x: Tensor) -> None:  # on CUDA on the lane's stream, which the future records
            try:
                self.show_fault(x)
            finally:
                settle(future, flat)

        self.launch(runner, i, real(flat).view(-1), bucket.parameters(), None, None, landed)
        return future

    def aborted(self) -> None:
        for future, flat in self.futures:
            settle(future, flat)


def settle(future: Future[Tensor], flat: Tensor) -> None:
    """Complete a bucket's future, even after a failure, so that DDP does not hang; `Life.land` raises the error."""
    with contextlib.suppress(RuntimeError):  # it has been set
        future.set_result(flat)


_lives: "weakref.WeakKeyDictionary[DistributedDataParallel, DataParallelLife | None]" = weakref.WeakKeyDictionary()


def average(state: Any, bucket: GradBucket) -> Future[Tensor]:
    """Return the future of a bucket that DDP has filled. This hook is never removed, as a DDP model accepts only one.

    After `detach()` this hook averages the bucket as DDP does. `state` is a weak reference to the model.
    """
    model = state()
    if (life := _lives[model]) is not None:
        return life.fly(bucket)
    group = model.process_group
    work = dist.all_reduce(bucket.buffer().mul_(1 / group.size()), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]
