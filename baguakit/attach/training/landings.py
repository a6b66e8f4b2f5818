"""Gradients that have landed: with others an optimizer would train each rank alone.

`LeafStreams` are the CUDA streams on which autograd accumulates gradients: those of their forward passes, which may be
several. Autograd makes the stream that called backward wait for all of them, but only at the end of backward. A bucket
is launched earlier, and its gradients may be freed later.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from ...buckets import local
from ...lanes import Lane, current_stream
from ..runners.gradients import GradientRunner

GRAD, VERSION = attrgetter("grad"), attrgetter("_version")


class Landings:
    """The gradients with which each optimizer may step: those that have landed since its last step.

    It may also step again with what that step used: the same tensor, not written since, as its version counter tells.
    Each gradient has a counter of its own, also in a bucket.

    Args:
        optimizers: those attached.

    Attributes:
        fresh: for each optimizer the parameters, by id, whose gradients have landed since its last step.
        used: for each optimizer the parameters of its last step, by id, their gradients and the versions of these.
        places: for each optimizer those of its parameters that are in buckets of gradients, and their views.
        came: for each optimizer the backward passes since its last step, as one of its parameters tells.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.fresh: dict[Optimizer, set[int]] = {each: set() for each in optimizers}
        self.used: dict[Optimizer, tuple[Sequence[int], Sequence[Any], list[int]]] = {}
        self.places: dict[Optimizer, tuple[list[Tensor], list[int], list[Tensor]]] = {}
        self.came = dict.fromkeys(optimizers, 0)

    def follow(self, runners: Sequence[GradientRunner]) -> None:
        """Note which gradients lie in the buckets of these runners."""
        buckets = [bucket for runner in runners for bucket in runner.buckets]
        views = {id(p): view for bucket in buckets for p, view in zip(bucket.params, bucket.views, strict=True)}
        for optimizer in self.fresh:
            here = [p for p in params_of(optimizer) if id(p) in views]
            self.places[optimizer] = here, [id(p) for p in here], [views[id(p)] for p in here]

    def landed(self, params: Collection[int]) -> None:
        """Note that the gradients of parameters, given by id, have landed."""
        for fresh in self.fresh.values():
            fresh.update(params)

    def stepped(self, optimizer: Optimizer) -> None:
        """Note the gradients with which an optimizer has stepped."""
        self.came[optimizer] = 0
        self.fresh[optimizer].clear()
        params, ids, views = self.places[optimizer]
        if not params:
            return
        if params[0].grad is views[0]:  # so they all are, but where the user has replaced some
            self.used[optimizer] = ids, views, list(map(VERSION, views))
            return
        params = params_of(optimizer)
        grads = list(map(GRAD, params))
        versions = [-1 if each is None else version(each) for each in grads]
        kept = [None if each is None else TensorWeakRef(each) for each in grads]  # the user's may be freed
        self.used[optimizer] = [*map(id, params)], kept, versions

    def waiting(self) -> Optimizer | None:
        """Return an optimizer that has not stepped since a backward, or None."""
        return next((optimizer for optimizer, passes in self.came.items() if passes), None)

    def strange(self, optimizer: Optimizer, accumulated: Collection[Tensor] = ()) -> Iterator[Tensor]:
        """Yield parameters with gradients that neither have landed nor were used by the optimizer's last step.

        Args:
            accumulated: parameters that have gradients of this rank alone since they landed.
        """
        fresh, params = self.fresh[optimizer], params_of(optimizer)
        if not accumulated and fresh.issuperset(map(id, params)):
            return
        used: dict[int, Any] = {p: rest for p, *rest in zip(*self.used.get(optimizer, ((), (), ())), strict=True)}
        for p in params:
            grad: Any = p.grad
            if grad is None or (id(p) in fresh and p not in accumulated):
                continue
            before, at = used.get(id(p), (None, 0))
            if isinstance(before, TensorWeakRef):
                before = before()
            if grad is not before or version(grad) != at:
                yield p

    def is_blank(self, optimizer: Optimizer) -> bool:
        """Return True if a step would train nothing, as torch.distributed.checkpoint makes one to get optimizer state.

        It has no state, no backward came since its last step, every gradient is there, and they and every lr are 0. One
        parameter is enough to tell: where a backward has not reached it, its gradient is missing.
        """
        if optimizer.state or self.came[optimizer]:
            return False
        rates = [group.get("lr", 1.0) for group in optimizer.param_groups]
        if any(map(is_on_device, rates)) or any(rates):
            return False
        grads = [p.grad for p in params_of(optimizer) if p.requires_grad]
        return not any(grad is None or local(grad).any() for grad in grads)


def version(grad: Tensor) -> int:
    """Return the version of a gradient; -1 of one made in inference mode, which has none."""
    return -1 if grad.is_inference() else grad._version


def is_on_device(x: Any) -> bool:
    """Return True if reading `x` would wait for a device."""
    return isinstance(x, Tensor) and not x.is_cpu


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters that an optimizer steps."""
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        params += group["params"]
    return params


class LeafStreams:
    """The streams that have accumulated the gradients that have not landed yet. Empty on the CPU."""

    def __init__(self) -> None:
        self.params: dict[Any, set[Tensor]] = {}  # by stream

    def note(self, p: Tensor) -> None:
        """Note that the current stream has accumulated a gradient of `p`."""
        if (stream := current_stream(p.device)) is not None:
            self.params.setdefault(stream, set()).add(p)

    def of(self, params: Iterable[Tensor]) -> list[Any]:
        """Return the streams that have accumulated gradients of these parameters."""
        wanted = list(params)
        return [stream for stream, made in self.params.items() if not made.isdisjoint(wanted)]

    def follow(self, params: Iterable[Tensor]) -> None:
        """Let the current stream wait for the gradients of these parameters, and keep their memory until it has."""
        wanted = set(params)
        for stream, made in self.params.items():
            here = current_stream(stream.device)
            for p in made & wanted if stream != here else ():
                here.wait_stream(stream)
                if p.grad is not None:
                    p.grad.record_stream(here)

    def landed(self, lanes: Collection[Lane]) -> None:
        """Keep the memory of the gradients until the lanes have read it, and forget the gradients.

        The current stream has waited for the lanes. Other streams have not, and could otherwise reuse that memory as
        soon as the host frees a gradient.
        """
        for stream, params in self.params.items():
            for lane in lanes if stream != current_stream(stream.device) else ():
                lane.uses([p.grad for p in params])
        self.params.clear()
