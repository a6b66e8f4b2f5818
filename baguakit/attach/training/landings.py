"""Gradients that have landed: with others an optimizer would train each rank alone."""

import sys
from collections.abc import Collection, Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from ...buckets import local
from ..runners.gradients import GradientRunner
from ..setup.sharding import is_sharded

GRAD, VERSION = attrgetter("grad"), attrgetter("_version")


class Landings:
    """The gradients with which each optimizer may step: those that have landed since its last step.

    It may also step again with what that step used: the same tensor, not written since, as its version counter tells.
    Each gradient has a counter of its own, also in a bucket.

    Args:
        optimizers: those attached.

    Attributes:
        fresh: for each optimizer the parameters, by id, whose gradients have landed since its last step.
        used: for each optimizer the parameters of its last step, their gradients and the versions of these.
        views: the gradients that lie in buckets, by id.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.fresh: dict[Optimizer, set[int]] = {each: set() for each in optimizers}
        self.used: dict[Optimizer, tuple[list[Tensor], list[Any], list[int]]] = {}
        self.views: set[int] = set()

    def follow(self, runners: Sequence[GradientRunner]) -> None:
        """Note the gradients that lie in the buckets of these runners."""
        self.views = {id(view) for runner in runners for bucket in runner.all_buckets() for view in bucket.views}

    def landed(self, params: Collection[int]) -> None:
        """Note that the gradients of parameters, given by id, have landed."""
        for fresh in self.fresh.values():
            fresh.update(params)

    def stepped(self, optimizer: Optimizer) -> None:
        """Note the gradients with which an optimizer has stepped."""
        self.fresh[optimizer].clear()
        params = params_of(optimizer)
        grads: list[Any] = list(map(GRAD, params))
        try:
            versions: list[int] = list(map(VERSION, grads))
        except (AttributeError, RuntimeError):  # None has none, nor have tensors made in inference_mode
            versions = [-1 if each is None or each.is_inference() else each._version for each in grads]
        for grad in grads:
            if grad is not None:
                if id(grad) not in self.views:  # the user has replaced them: they may be freed
                    grads = [None if each is None else TensorWeakRef(each) for each in grads]
                break
        self.used[optimizer] = params, grads, versions

    def strange(self, optimizer: Optimizer, accumulated: Collection[Tensor] = ()) -> Iterator[Tensor]:
        """Yield parameters with gradients that neither have landed nor were used by the optimizer's last step.

        Args:
            accumulated: parameters that have gradients of this rank alone since they landed.
        """
        fresh, params = self.fresh[optimizer], params_of(optimizer)
        if not accumulated and fresh.issuperset(map(id, params)):
            return
        used: dict[int, Any] = {id(p): rest for p, *rest in zip(*self.used.get(optimizer, ((), (), ())), strict=True)}
        for p in params:
            grad: Any = p.grad
            if grad is None or (id(p) in fresh and p not in accumulated):
                continue
            before, version = used.get(id(p), (None, 0))
            if isinstance(before, TensorWeakRef):
                before = before()
            if grad is not before or (-1 if grad.is_inference() else grad._version) != version:
                yield p

    def is_blank(self, optimizer: Optimizer, accumulated: Collection[Tensor]) -> bool:
        """Return True if a step would train nothing, as torch.distributed.checkpoint makes one to get optimizer state.

        It has no state, no backward came since its last step, and every gradient and every lr is 0.
        """
        if self.fresh[optimizer] or accumulated:
            return False
        rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
        if any(map(is_on_device, rates)) or any(rates):
            return False
        params = params_of(optimizer)
        if any(map(is_sharded, params)) and not within_checkpointing():  # the shards of one rank alone may have zeros
            return False
        return not any(p.grad is not None and local(p.grad).any() for p in params)


def within_checkpointing() -> bool:
    """Return whether torch.distributed.checkpoint is among the callers."""
    frame: Any = sys._getframe()
    while (frame := frame.f_back) is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            return True
    return False


def is_on_device(x: Any) -> bool:
    """Return True if reading `x` would wait for a device."""
    return isinstance(x, Tensor) and not x.is_cpu


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer steps."""
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        params += group["params"]
    return params
