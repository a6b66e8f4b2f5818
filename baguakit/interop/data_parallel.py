"""Stages as the communication hook of `DistributedDataParallel`.

    g of a bucket is ready → launched on the lane, in the order of the buckets → landed when backward ends

DDP asks its hook for a future of each bucket and continues with backward; so the stage overlaps it, on a CUDA stream or
a thread. After the first backward DDP makes new buckets: the state of a stage follows the parameters.
"""

import threading
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
from ..comm import Comm, check_comm, check_device, members_of
from ..flights import call_unscaled
from ..runtime import Setup, named
from ..stages import Stage, State
from .handle import Handle, make_hook_setup
from .runners import rules_on_gradients

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
) -> Handle:
    """Let a stage average the gradients of a model in `DistributedDataParallel`, in place of DDP's all-reduce.

        handle = bk.interop.ddp(ddp_model, bk.stages.ErrorFeedback(bk.stages.CompressedMean()))

    Collective. `no_sync()`, `find_unused_parameters`, `static_graph` and `gradient_as_bucket_view` are DDP's as before;
    its `join()` is not, since a rank that has finished cannot answer for a stage. After `handle.detach()` the model
    averages as DDP does.

    Args:
        ddp_model: the wrapped model.
        stage: such as `bk.stages.CompressedMean()`; or an algorithm on gradients, such as `bk.algorithms.bytegrad()`.
        comm: the ranks of the model's process group, in a `Comm(mesh=…)` that knows the nodes for `Hierarchical`;
            None means that group.
        scaler: the GradScaler in use, so that the stage sees gradients without its factor.
        timeout: seconds (or a timedelta) after which a flight is given up and the rank at fault is named; None: 600.

    Returns:
        A `Handle`: `state_dict`, `load_state_dict`, `report`, `detach`.

    Raises:
        TypeError, ValueError: something cannot work, or ranks differ; on every rank.
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(
            message("ddp_model", "a DistributedDataParallel", ddp_model) + "; use bk.attach for other modules"
        )
    group = ddp_model.process_group
    comm = Comm(group) if comm is None else comm
    check_comm(comm)

    def make() -> Setup:
        rules = rules_on_gradients(stage)
        plain = named(ddp_model.module)
        names = {p: name for p, name in plain.items() if p.requires_grad}
        frozen = [name for p, name in plain.items() if not p.requires_grad]
        for p, name in names.items():
            check_averaged(f"parameter {name}", p)
        device = next(iter(names)).device
        check_device(comm.group, device)
        if members_of(comm.group) != members_of(group):
            raise ValueError(
                f"comm= has the ranks {members_of(comm.group)} and the model's process group "
                f"{members_of(group)}; they must be the same"
            )
        for rule in rules:
            rule.stage.check(comm)
        held = _hooks.get(ddp_model)
        if held is not None and held.handle is not None:
            raise ValueError("this model has a stage already: call detach() on its handle before giving it another")
        lines = [f"{name} {tuple(p.shape)} {p.dtype}" for p, name in names.items()]
        return make_hook_setup(rules, names, frozen, device, timeout, scaler, lines)

    return DataParallelHandle(make, comm, timeout, ddp_model)


class DataParallelHandle(Handle):
    """Stages at work in the communication hook of a `DistributedDataParallel`."""

    def __init__(self, make: Any, comm: Comm, timeout: Any, ddp_model: DistributedDataParallel) -> None:
        self._futures: list[BucketFuture] = []
        super().__init__(make, comm, timeout)
        with self._runtime.or_abandon():
            hook = _hooks.get(ddp_model)
            if hook is None:
                hook = Hook(ddp_model.process_group)
                ddp_model.register_comm_hook(None, hook.average)
                _hooks[ddp_model] = hook
        hook.handle = self
        self._runtime.unhook.append(lambda: setattr(hook, "handle", None))

    def _fly(self, bucket: GradBucket) -> Future[Tensor]:
        flat, i = bucket.buffer(), bucket.index()
        if flat.layout is not torch.strided:
            raise TypeError("a sparse gradient cannot travel in a bucket; use sparse=False in the embedding")
        runner, future = self._begin(), BucketFuture(flat)
        if i == 0:
            self._futures = []
        self._futures.append(future)
        if runner is None:
            future.set()
        else:
            scale, fault = self._setup.loss_scale(), self._channel.monitor.fault

            def work(stage: Stage, x: Tensor, state: State, comm: Comm) -> None:
                try:
                    call_unscaled(stage, x, state, comm, scale)
                    if fault:
                        fault.multiply_([x])
                finally:
                    future.set()

            place = runner.fit(i, real(flat).view(-1), bucket.parameters())
            self._take_off(runner, place, work)
        return future.future

    def _aborted(self) -> None:
        for future in self._futures:
            future.set()


class BucketFuture:
    """The future of a bucket. It is set after a failure too, so that DDP does not wait forever: `_land` raises.

    On CUDA it is set on the lane's stream, which the future records.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.lock = flat, threading.Lock()
        self.future: Future[Tensor] = Future(devices=[flat.device]) if flat.is_cuda else Future()

    def set(self) -> None:
        """Set the future, once."""
        with self.lock:
            if not self.future.done():
                self.future.set_result(self.flat)


class Hook:
    """The communication hook of a DDP model. DDP takes only one, ever, so successive handles share it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.handle: DataParallelHandle | None = None  # the one that is attached

    def average(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Return the future of a bucket that DDP has filled; without a handle average it as DDP does."""
        if self.handle is not None:
            return self.handle._fly(bucket)
        flat = bucket.buffer()
        work = dist.all_reduce(flat.mul_(1 / self.group.size()), group=self.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


_hooks: "weakref.WeakKeyDictionary[DistributedDataParallel, Hook]" = weakref.WeakKeyDictionary()
