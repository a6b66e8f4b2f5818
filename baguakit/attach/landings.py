"""Check that optimizers step only with gradients whose flights have landed; otherwise each rank would train alone."""

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
    """The gradients with which an optimizer may step, because they have landed since its last step.

    The optimizer may also use the gradients of its last step again, if they are the same tensors with unchanged version
    counters. Each gradient has a separate counter, even in a bucket.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.fresh: set[int] = set()  # ids of parameters whose gradients have landed since the last step
        self.passes = 0  # backward passes since the last step, counted at one parameter
        # The last step used these: ids of parameters, the gradients of these parameters, and versions of the gradients.
        self.used: tuple[Sequence[int], Sequence[Any], Sequence[int]] = (), (), ()
        # Parameters that are in buckets of gradients, the ids of these parameters, and the views for their gradients.
        self.places: tuple[list[Tensor], list[int], list[Tensor]] = [], [], []

    def follow(self, views: dict[Tensor, Tensor]) -> None:
        here = [p for p in params_of(self.optimizer) if p in views]
        self.places = here, [*map(id, here)], [views[p] for p in here]

    def stepped(self) -> None:
        self.passes = 0
        self.fresh.clear()
        params, ids, views = self.places
        if params and params[0].grad is views[0]:  # then all are views, unless the user has replaced some
            self.used = ids, views, list(map(VERSION, views))
        elif params:
            params = params_of(self.optimizer)
            kept = [None if p.grad is None else TensorWeakRef(p.grad) for p in params]  # weak: users may free them
            self.used = [*map(id, params)], kept, [-1 if p.grad is None else version(p.grad) for p in params]

    def strange(self, accumulated: Collection[Tensor] = ()) -> Iterator[Tensor]:
        """Yield parameters whose gradients have neither landed nor been used, or were `accumulated` since."""
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
        """Return True if a step would train nothing: there is no state, and gradients and learning rates are 0.

        torch.distributed.checkpoint makes such a step to create state. Call this only if `passes` is 0. `passes` is
        counted at one parameter: if no backward has reached this parameter, the gradient is None and the result False.
        """
        if self.optimizer.state:
            return False
        rates = [group.get("lr", 1.0) for group in self.optimizer.param_groups]
        if any(isinstance(rate, Tensor) and not rate.is_cpu for rate in rates) or any(rates):  # would wait for a device
            return False
        grads = [p.grad for p in params_of(self.optimizer) if p.requires_grad]
        return not any(grad is None or local(grad).any() for grad in grads)


def version(grad: Tensor) -> int:
    """Return the version of a gradient; −1 if it was made in inference mode, and therefore has no version."""
    return -1 if grad.is_inference() else grad._version


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


class LeafStreams:
    """The CUDA streams on which gradients have been accumulated, until these gradients land.

    Autograd makes the current stream wait for these streams only at the end of backward. A bucket is launched earlier,
    so its lane must wait for these streams, too. The memory of the gradients must be kept until the lane has read it.
    """

    def __init__(self) -> None:
        self.params: dict[Any, set[Tensor]] = {}  # by stream

    def note(self, p: Tensor) -> None:
        if (stream := current_stream(p.device)) is not None:
            self.params.setdefault(stream, set()).add(p)

    def follow(self, params: Iterable[Tensor], lane: Lane | None) -> None:
        """Make `lane`, or else the current stream, wait until the gradients of `params` have been accumulated."""
        wanted = set(params)
        streams = {stream: made & wanted for stream, made in self.params.items() if made & wanted}
        if lane is not None:
            lane.follow(streams)
            return
        for stream, made in streams.items():
            here = current_stream(stream.device)
            for p in made if stream != here else ():
                here.wait_stream(stream)
                if p.grad is not None:  # its memory is kept until this stream has read it
                    p.grad.record_stream(here)

    def landed(self, lanes: Collection[Lane]) -> None:
        """Forget the streams. As these have not waited for the lanes, keep the gradients until lanes have read them."""
        for stream, params in self.params.items():
            for lane in lanes if stream != current_stream(stream.device) else ():
                lane.uses([p.grad for p in params])
        self.params.clear()


class OtherOptimizers:
    """Warn once if an optimizer trains the model that is not `attached`, though others are: no rule sees its steps."""

    def __init__(self, model: nn.Module, attached: Sequence[Optimizer]) -> None:
        self.model, self.attached = model, attached
        self.ours = False  # an attached optimizer is in a step: optimizers that step within this step are parts of it
        self.found = ""  # the class name of an optimizer that steps the model and is not attached
        self._warned = False

    def steps(self, optimizer: Optimizer, *_: Any) -> None:
        """Warn if an unattached optimizer is about to step the model. Raise an error if a step is within a backward."""
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
        self.warn(
            f"backward passes have come, and {type(optimizer).__name__} has not stepped: no rule on weights flies "
            "before, and each rank trains alone if something else steps; step the optimizer that is attached"
        )

    def look_for_copies(self, optimizer: Optimizer, p: Tensor, before: Tensor) -> None:
        """Warn if an optimizer's state has a copy of `p`, which may overwrite `p`. `before` is `p` before the step."""
        held = {key: each for key, each in optimizer.state.get(p, {}).items() if isinstance(each, Tensor)}
        for key, copy in ((key, local(each).to(before.dtype)) for key, each in held.items() if each.shape == p.shape):
            if torch.equal(copy, before) or torch.equal(copy, local(p)):
                self.warn(
                    f"{type(optimizer).__name__} keeps a copy of the weights in its state, {key!r}, which rules on "
                    "weights do not average: what an exchange brings is lost where the optimizer steps from its copy; "
                    "use rules on gradients, or an optimizer without one"
                )

    def warn(self, sentence: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(sentence, stacklevel=3)


def sample_of(optimizer: Optimizer) -> tuple[Tensor, Tensor] | None:
    """Return one trainable parameter that is not all zero, and a copy of its values; None if all are zero."""
    chosen = (p for p in params_of(optimizer) if p.requires_grad and local(p).any())
    return None if (p := next(chosen, None)) is None else (p, local(p).clone())


def within_backward(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} within a backward, before the gradients of all ranks have landed; step when backward has returned"
    )
