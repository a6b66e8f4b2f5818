"""Gradients that have landed. With other gradients an optimizer would train each rank alone."""

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef

from ..buckets import local
from ..lanes import Lane, current_stream

GRAD, VERSION = attrgetter("grad"), attrgetter("_version")


class Landings:
    """The gradients with which an optimizer may step: they have landed since its last step.

    It may also use the gradients of its last step again, if they are the same tensors with unchanged version counters.
    Each gradient has a separate counter, even in a bucket.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.fresh: set[int] = set()  # the parameters, by id, whose gradients have landed since its last step
        self.passes = 0  # backward passes since then, counted at one parameter
        # Of its last step: the ids of the parameters, their gradients, and the versions of the gradients.
        self.used: tuple[Sequence[int], Sequence[Any], Sequence[int]] = (), (), ()
        # Its parameters that are in buckets of gradients, their ids, and their views of the buckets.
        self.places: tuple[list[Tensor], list[int], list[Tensor]] = [], [], []

    def follow(self, views: dict[Tensor, Tensor]) -> None:
        """Record the views of the buckets in which the gradients of parameters lie."""
        here = [p for p in params_of(self.optimizer) if p in views]
        self.places = here, [*map(id, here)], [views[p] for p in here]

    def stepped(self) -> None:
        """Record the gradients with which the optimizer has stepped."""
        self.passes = 0
        self.fresh.clear()
        params, ids, views = self.places
        if params and params[0].grad is views[0]:  # so they all are, but where the user has replaced some
            self.used = ids, views, list(map(VERSION, views))
        elif params:
            params = params_of(self.optimizer)
            kept = [None if p.grad is None else TensorWeakRef(p.grad) for p in params]  # the user's may be freed
            self.used = [*map(id, params)], kept, [-1 if p.grad is None else version(p.grad) for p in params]

    def strange(self, accumulated: Collection[Tensor] = ()) -> Iterator[Tensor]:
        """Yield parameters whose gradients have not landed and were not used by the last step.

        To the gradients of parameters in `accumulated`, this rank has added its own since they landed.
        """
        params = params_of(self.optimizer)
        if not accumulated and self.fresh.issuperset(map(id, params)):
            return
        used: dict[int, Any] = {p: rest for p, *rest in zip(*self.used, strict=True)}
        for p in params:
            grad: Any = p.grad
            if grad is None or (id(p) in self.fresh and p not in accumulated):
                continue
            before, at = used.get(id(p), (None, 0))
            if isinstance(before, TensorWeakRef):
                before = before()
            if grad is not before or version(grad) != at:
                yield p

    def is_blank(self) -> bool:
        """Return True if a step would train nothing: torch.distributed.checkpoint makes one to get optimizer state.

        Called if no backward came since the last step. Then the optimizer has no state, and all gradients and learning
        rates are 0. `passes` counts at one parameter: if a backward has not reached it, it has no gradient.
        """
        if self.optimizer.state:
            return False
        rates = [group.get("lr", 1.0) for group in self.optimizer.param_groups]
        if any(isinstance(rate, Tensor) and not rate.is_cpu for rate in rates) or any(rates):  # would wait for a device
            return False
        grads = [p.grad for p in params_of(self.optimizer) if p.requires_grad]
        return not any(grad is None or local(grad).any() for grad in grads)


def version(grad: Tensor) -> int:
    """Return the version of a gradient; -1 of one made in inference mode, which has none."""
    return -1 if grad.is_inference() else grad._version


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


class LeafStreams:
    """The CUDA streams of the forward passes, on which gradients that have not landed yet were accumulated.

    Autograd makes the stream that called backward wait for all these streams, but only at the end of backward. A bucket
    is launched earlier, and its gradients may be freed later.
    """

    def __init__(self) -> None:
        self.params: dict[Any, set[Tensor]] = {}  # by stream

    def note(self, p: Tensor) -> None:
        if (stream := current_stream(p.device)) is not None:
            self.params.setdefault(stream, set()).add(p)

    def follow(self, params: Iterable[Tensor], lane: Lane | None) -> None:
        """Make a lane wait for the gradients of these parameters.

        None: make the current stream wait, and keep the memory of the gradients until it has waited.
        """
        wanted = set(params)
        streams = {stream: made & wanted for stream, made in self.params.items() if made & wanted}
        if lane is not None:
            lane.follow(streams)
            return
        for stream, made in streams.items():
            here = current_stream(stream.device)
            for p in made if stream != here else ():
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


class OtherOptimizers:
    """Warn once if an optimizer trains the model but is not attached: no rule sees its steps.

    If no optimizers are `attached`, any optimizer may step.
    """

    def __init__(self, model: nn.Module, attached: Sequence[Optimizer]) -> None:
        self.model, self.attached = model, attached
        self.ours = False  # an attached optimizer steps: one that steps within it is a part of it
        self.found = ""  # the class of another optimizer
        self._warned = False

    def steps(self, optimizer: Optimizer, *_: Any) -> None:
        """Check any optimizer that is about to step. Raise a RuntimeError if it trains the model within a backward."""
        ours = optimizer in self.attached
        within = torch._C._current_graph_task_id() != -1 and (ours or not self.attached)
        stranger = not (self.found or self.ours or ours) and self.attached
        if not (within or stranger):
            return
        if set(self.model.parameters()).isdisjoint(params_of(optimizer)):
            return
        if within:
            raise within_backward(f"{type(optimizer).__name__} steps")
        self.found = type(optimizer).__name__
        self.warn(
            f"{self.found} steps parameters of the attached model and is not the optimizer that was attached: the "
            "attachment does not see its steps, and ranks may drift apart; give attach the optimizer that trains"
        )

    def waits(self, optimizer: Optimizer) -> None:
        """Warn that rules on weights do nothing until the optimizer steps."""
        self.warn(
            f"backward passes have come, and {type(optimizer).__name__} has not stepped: no rule on weights flies "
            "before, and each rank trains alone if something else steps; step the optimizer that is attached"
        )

    def look_for_copies(self, optimizer: Optimizer, p: Tensor, before: Tensor) -> None:
        """Warn if an optimizer keeps a copy of the weights and may step from that. `before`: `p` before the step."""
        held = {key: each for key, each in optimizer.state.get(p, {}).items() if isinstance(each, Tensor)}
        for key, copy in ((key, local(each).to(before.dtype)) for key, each in held.items() if each.shape == p.shape):
            if torch.equal(copy, before) or torch.equal(copy, local(p)):
                self.warn(
                    f"{type(optimizer).__name__} keeps a copy of the weights in its state, {key!r}, which rules on "
                    "weights do not average: what an exchange brings is lost where the optimizer steps from its copy; "
                    "use rules on gradients, or an optimizer without one"
                )

    def warn(self, sentence: str) -> None:
        """Warn, but only the first time."""
        if not self._warned:
            self._warned = True
            warnings.warn(sentence, stacklevel=3)


def sample_of(optimizer: Optimizer) -> tuple[Tensor, Tensor] | None:
    """Return a parameter that an optimizer is about to step, and a copy of it; None if all parameters are zero."""
    chosen = (p for p in params_of(optimizer) if p.requires_grad and local(p).any())
    return None if (p := next(chosen, None)) is None else (p, local(p).clone())


def within_backward(what: str) -> RuntimeError:
    """Return the error of a step that does not wait for the gradients of all ranks."""
    return RuntimeError(
        f"{what} within a backward, before the gradients of all ranks have landed; step when backward has returned"
    )
