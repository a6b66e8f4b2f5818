"""The hooks of an attachment on parameters and optimizers, which drive its engine.

An optimizer that steps with gradients that have not landed would train each rank alone.
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import TensorWeakRef

from ..buckets import local
from ..lanes import Moment
from ..runtime import or_abandon
from .backward import check_unconverted, hooked, within_backward

if TYPE_CHECKING:
    from .engine import Engine

VERSION = attrgetter("_version")
UNSTEPPED = 1000  # backward passes: more than are accumulated for a step


class Hooks:
    """The hooks of an attachment.

    They are set when this is made, follow the parameters of the engine's buckets, and are taken out at its end.
    """

    def __init__(self, engine: "Engine") -> None:
        self.engine, self.others = engine, engine.other_optimizers
        self._of_params: dict[Tensor, Any] = {}
        self._watches: dict[Optimizer, list[Any]] = {}  # hooks that count backward passes
        self._evaluating = False  # a closure, or one has raised
        self._blank = False  # the step under way is none
        self._begun: dict[Optimizer, Moment] = {}  # when the steps under way began
        self._copies = dict.fromkeys(engine.setup.optimizers if engine.on_weights else ())  # those not looked at
        # torch.compile of a step leaves them out. By a decorator, the compiler would be imported with the package.
        outside: Any = torch.compiler.disable
        self._of_optimizers: list[Any] = [register_optimizer_step_pre_hook(outside(self.others.steps))]
        engine.unhook.append(self.remove)
        with or_abandon(engine):
            for optimizer in engine.setup.optimizers:
                before: Any = optimizer.register_step_pre_hook(outside(self._before_step))
                hooks: Any = optimizer._optimizer_step_pre_hooks
                hooks.move_to_end(before.id, last=False)  # other hooks must find what has landed
                self._of_optimizers += [before, optimizer.register_step_post_hook(outside(self._after_step))]
                # By one parameter, until the optimizer has state: then no step is blank.
                params = [p for p in params_of(optimizer) if p.requires_grad][-1:]
                count = partial(self._passed, optimizer)
                self._watches[optimizer] = [p.register_post_accumulate_grad_hook(count) for p in params]
            self.follow()

    def follow(self) -> None:
        """Hook the parameters of the engine's buckets of gradients, and no others."""
        buckets = [bucket for runner in self.engine.backward.runners for bucket in runner.buckets]
        params = {p: view for bucket in buckets for p, view in zip(bucket.params, bucket.views, strict=True)}
        views = {id(p): view for p, view in params.items()}
        for landings in self.engine.landings.values():
            landings.follow(views)
        for p in [p for p in self._of_params if p not in params]:
            self._of_params.pop(p).remove()
        for p in params:
            if p not in self._of_params:
                self._of_params[p] = hooked(p, self.engine)

    def _passed(self, optimizer: Optimizer, _: Any) -> None:
        """Count a backward pass."""
        landings = self.engine.landings[optimizer]
        landings.passes += 1
        if landings.passes == UNSTEPPED and not self.engine.backward.runners:
            self.others.waits(optimizer)

    def remove(self) -> None:
        """Take all hooks out."""
        for hook in (*self._of_params.values(), *chain(*self._watches.values()), *self._of_optimizers):
            hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Return the arguments of the step, the optimizer being the first, where they must change; else None."""
        engine, backward = self.engine, self.engine.backward
        if engine.runtime.monitor.error is not None:
            engine.check()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self.others.ours = True
        landings = engine.landings[optimizer]
        if closure is None and landings.is_blank():
            self._blank = True
            return None
        if backward.task is not None:
            backward.drop_failed()
        if self._evaluating:  # what has failed was in the closure: that step is over
            self._evaluating = backward.dropped = engine.begun = False
        if engine.on_weights and not engine.begun:
            check_unconverted(engine.on_weights, engine.runtime.setup.names)
        if optimizer in self._copies:
            self._copies[optimizer] = sample_of(optimizer)
        evaluates = callable(closure)
        if not backward.dropped:
            engine.follow_parameters()
            engine.begin_step(land=not evaluates)
        self._begun[optimizer] = engine.log.now()
        if not evaluates:
            self._check_gradients(optimizer)
            return None
        followed = partial(self._evaluate, optimizer, closure)
        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call the closure of a step, once or once more."""
        self._evaluating = True
        result = closure()
        self._evaluating = False
        self._check_gradients(optimizer)
        self.engine.landings[optimizer].stepped()  # with these gradients, and it may evaluate again
        return result

    def _check_gradients(self, optimizer: Optimizer) -> None:
        """Raise a RuntimeError if an optimizer is about to step with a gradient that should have landed and has not."""
        engine, backward = self.engine, self.engine.backward
        for p in engine.landings[optimizer].strange(backward.touched) if backward.runners else ():
            rules = [each.rule for each in engine.acting() if id(p) in each.ids]
            if rules and p.grad is not None and p.grad.any():  # zeros are those of zero_grad(set_to_none=False)
                raise RuntimeError(
                    f"{type(optimizer).__name__} steps with a gradient of {engine.setup.names[p]} that {rules[0]!r} "
                    "has not averaged: no backward outside att.no_sync() has brought it since the last step; call "
                    "att.average_() when gradients have been put into .grad in another way"
                )

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        engine, dropped = self.engine, self.engine.backward.dropped
        self.others.ours = False
        if self._blank:
            self._blank = False
            return
        if (begun := self._begun.pop(optimizer, None)) is not None:
            engine.log.parts.append((f"{type(optimizer).__name__}.step", begun, engine.log.now()))
        engine.landings[optimizer].stepped()
        watches = self._watches[optimizer]
        while watches and optimizer.state:
            watches.pop().remove()
        if sample := self._copies.pop(optimizer, None):
            self.others.look_for_copies(optimizer, *sample)
        if dropped:
            engine.begun = False
        elif not engine.begun:  # a closure has made up for a backward that failed
            engine.begin_step()
        engine.stepped.add(optimizer)
        engine.backward.divided = len(engine.stepped) < len(engine.runtime.setup.optimizers)
        if not engine.backward.divided:
            engine.stepped.clear()
            engine.backward.dropped = False
            if not dropped:
                engine.end_step()


class Landings:
    """The gradients with which an optimizer may step: they have landed since its last step.

    It may also step again with what that step used: the same tensor, not written since, as its version counter tells.
    Each gradient has a counter of its own, also in a bucket.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.fresh: set[int] = set()  # the parameters, by id, whose gradients have landed since its last step
        self.passes = 0  # backward passes since then, as one of its parameters tells
        # The parameters of its last step, by id: their gradients, and the versions of the gradients.
        self.used: tuple[Sequence[int], Sequence[Any], Sequence[int]] = (), (), ()
        # Those of its parameters that are in buckets of gradients, their ids, and their views.
        self.places: tuple[list[Tensor], list[int], list[Tensor]] = [], [], []

    def follow(self, views: dict[int, Tensor]) -> None:
        """Note where the gradients of parameters, by id, lie in buckets."""
        here = [p for p in params_of(self.optimizer) if id(p) in views]
        self.places = here, [id(p) for p in here], [views[id(p)] for p in here]

    def stepped(self) -> None:
        """Note the gradients with which the optimizer has stepped."""
        self.passes = 0
        self.fresh.clear()
        params, ids, views = self.places
        if not params:
            return
        if params[0].grad is views[0]:  # so they all are, but where the user has replaced some
            self.used = ids, views, list(map(VERSION, views))
            return
        params = params_of(self.optimizer)
        kept = [None if p.grad is None else TensorWeakRef(p.grad) for p in params]  # the user's may be freed
        self.used = [*map(id, params)], kept, [-1 if p.grad is None else version(p.grad) for p in params]

    def strange(self, accumulated: Collection[Tensor] = ()) -> Iterator[Tensor]:
        """Yield parameters with gradients that neither have landed nor were used by the last step.

        Those in `accumulated` have gradients of this rank alone since they landed.
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
        """Return True if a step would train nothing, as torch.distributed.checkpoint makes one to get optimizer state.

        There is no state, no backward came since the last step, every gradient is there, and they and every lr are 0.
        One parameter is enough to tell: where a backward has not reached it, its gradient is missing.
        """
        if self.optimizer.state or self.passes:
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
    """Return the parameters that an optimizer steps."""
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        params += group["params"]
    return params


class OtherOptimizers:
    """A watch for optimizers that train the model and are not attached: their steps are not seen. Warns once.

    With no `attached` optimizers any may step.
    """

    def __init__(self, model: nn.Module, attached: Sequence[Optimizer]) -> None:
        self.model, self.attached = model, attached
        self.ours = False  # an attached optimizer steps: one that steps within it is a part of it
        self.found = ""  # the class of another optimizer
        self._warned = False

    def steps(self, optimizer: Optimizer, *_: Any) -> None:
        """Check an optimizer that is about to step: any of this process.

        Raises:
            RuntimeError: it is attached, or none is, and it steps the model within a backward.
        """
        ours = optimizer in self.attached
        within = torch._C._current_graph_task_id() != -1 and (ours or not self.attached)
        stranger = not (self.found or self.ours or ours) and self.attached
        if not (within or stranger):
            return
        parameters = {id(p) for p in self.model.parameters()}
        if not any(id(p) in parameters for p in params_of(optimizer)):
            return
        if within:
            raise within_backward(f"{type(optimizer).__name__} steps")
        self.found = type(optimizer).__name__
        self.warn(
            f"{self.found} steps parameters of the attached model and is not the optimizer that was attached: the "
            "attachment does not see its steps, and ranks may drift apart; give attach the optimizer that trains"
        )

    def waits(self, optimizer: Optimizer) -> None:
        """Warn that rules on weights do not fly: they do when the optimizer steps."""
        self.warn(
            f"backward passes have come, and {type(optimizer).__name__} has not stepped: no rule on weights flies "
            "before, and each rank trains alone if something else steps; step the optimizer that is attached"
        )

    def look_for_copies(self, optimizer: Optimizer, p: Tensor, before: Tensor) -> None:
        """Warn if an optimizer remembers the weights, and may step from what it remembers: `p` was `before`."""
        for key, value in optimizer.state.get(p, {}).items():
            if not isinstance(value, Tensor) or value.shape != p.shape:
                continue
            copy = local(value).to(before.dtype)
            if torch.equal(copy, before) or torch.equal(copy, local(p)):
                self.warn(
                    f"{type(optimizer).__name__} keeps a copy of the weights in its state, {key!r}, which rules on "
                    "weights do not average: what an exchange brings is lost where the optimizer steps from its copy; "
                    "use rules on gradients, or an optimizer without one"
                )

    def warn(self, sentence: str) -> None:
        """Warn, if it is the first time."""
        if not self._warned:
            self._warned = True
            warnings.warn(sentence, stacklevel=3)


def sample_of(optimizer: Optimizer) -> tuple[Tensor, Tensor] | None:
    """Return a parameter that an optimizer is about to step, and a copy of it; None if all are zero."""
    chosen = (p for p in params_of(optimizer) if p.requires_grad and local(p).any())
    return None if (p := next(chosen, None)) is None else (p, local(p).clone())
