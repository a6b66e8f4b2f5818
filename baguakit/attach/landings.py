"""Gradients that have landed: with others an optimizer would train each rank alone.

`LeafStreams` are the CUDA streams on which autograd accumulates gradients: those of their forward passes, which may be
several. Autograd makes the stream that called backward wait for all of them, but only at the end of backward. A bucket
is launched earlier, and its gradients may be freed later.

`OtherOptimizers` watches for optimizers that train an attached model and are not attached: the attachment does not see
their steps.
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from ..buckets import local
from ..flights import GradientRunner
from ..lanes import Lane, current_stream

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


MANY = 32  # backward passes without a step: more than a GradScaler skips when it sets out


class OtherOptimizers:
    """A watch for optimizers that train the model and are not attached. Warns once.

    Args:
        model: the model.
        attached: its optimizers; with none, any may step.
    """

    def __init__(self, model: nn.Module, attached: Sequence[Optimizer]) -> None:
        self.model, self.attached = model, attached
        self.ours = False  # an attached optimizer steps: one that steps within it is a part of it
        self.found = ""  # the class of another optimizer
        self._warned = False

    def _trains(self, optimizer: Optimizer) -> bool:
        parameters = {id(p) for p in self.model.parameters()}
        return any(id(p) in parameters for p in params_of(optimizer))

    def steps(self, optimizer: Optimizer, *_: Any) -> None:
        """Check an optimizer that is about to step: any of this process.

        Raises:
            RuntimeError: it is attached, or none is, and it steps the model within a backward.
        """
        ours = optimizer in self.attached
        if torch._C._current_graph_task_id() != -1 and (ours or not self.attached) and self._trains(optimizer):
            raise within_backward(f"{type(optimizer).__name__} steps")
        if self.found or self.ours or not self.attached or ours:
            return
        if self._trains(optimizer):
            self.found = type(optimizer).__name__
            self._warn(
                f"{self.found} steps parameters of the attached model and is not the optimizer that was attached: the "
                "attachment does not see its steps, and ranks may drift apart; give attach the optimizer that trains"
            )

    def landed(self, passes: int) -> None:
        """Warn if many backward passes have landed since the last step."""
        if passes == MANY:
            self._warn(
                f"{MANY} backward passes have been averaged since the attached optimizer stepped: give attach the "
                "optimizer that trains, or use att.no_sync() while gradients are accumulated"
            )

    def waits(self, optimizer: Optimizer) -> None:
        """Warn that rules on weights do not fly: they do when the optimizer steps."""
        self._warn(
            f"backward passes have come, and {type(optimizer).__name__} has not stepped: no rule on weights flies "
            "before, and each rank trains alone if something else steps; step the optimizer that is attached"
        )

    def ended(self, step: int, flown: bool, waiting: Optimizer | None) -> None:
        """Raise a RuntimeError if another optimizer has trained the model and no rule ever flew.

        Warn if there was no step for rules on weights, and `waiting` had gradients for one.
        """
        if self.found and step == 0 and not flown:
            raise RuntimeError(
                f"{self.found} has trained the model and is not the optimizer that was attached, so that no rule ever "
                "flew: each rank has trained alone; give attach the optimizer that trains"
            )
        if step == 0 and waiting is not None:
            self.waits(waiting)

    def sample(self, optimizer: Optimizer) -> tuple[Tensor, Tensor] | None:
        """Return a parameter that an optimizer is about to step, and a copy of it; None if all are zero."""
        chosen = (p for p in params_of(optimizer) if p.requires_grad and local(p).any())
        return None if (p := next(chosen, None)) is None else (p, local(p).clone())

    def look_for_copies(self, optimizer: Optimizer, sample: tuple[Tensor, Tensor] | None) -> None:
        """Warn if an optimizer that has stepped remembers the weights, and may step from what it remembers."""
        if sample is None:
            return
        p, before = sample
        for key, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, Tensor) or value.shape != p.shape:
                continue
            copy = local(value).to(before.dtype)
            if torch.equal(copy, before) or torch.equal(copy, local(p)):
                self._warn(
                    f"{type(optimizer).__name__} keeps a copy of the weights in its state, {key!r}, which rules on "
                    "weights do not average: what an exchange brings is lost where the optimizer steps from its copy; "
                    "use rules on gradients, or an optimizer without one"
                )

    def _warn(self, sentence: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(sentence, stacklevel=3)


def within_backward(what: str) -> RuntimeError:
    """Return the error of a step that does not wait for the gradients of all ranks."""
    return RuntimeError(
        f"{what} within a backward, before the gradients of all ranks have landed; step when backward has returned"
    )
