"""Hooks on parameters and optimizers drive the engine of an attachment."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..lanes import Moment
from ..runtime.runtime import or_abandon
from .backward import check_unconverted, hooked
from .engine import Engine
from .landings import params_of, sample_of

UNSTEPPED = 1000  # backward passes without a step before a warning; nobody accumulates so many for a step


class Hooks:
    """The hooks of an attachment, until the engine's end. `follow` hooks the parameters of new buckets."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.others = engine, engine.other_optimizers
        self._of_params: dict[Tensor, Any] = {}
        self._watches: dict[Optimizer, list[Any]] = {}  # hooks that count backward passes
        self._evaluating = False  # a closure is running, or has raised an error
        self._blank = False  # the current step trains nothing
        self._begun: dict[Optimizer, Moment] = {}  # when the current steps began
        self._copies = dict.fromkeys(engine.setup.optimizers if engine.on_weights else ())  # to be checked for copies
        # torch.compile must not trace hooks of optimizers. A decorator would import the compiler with this module.
        outside: Any = torch.compiler.disable
        self._of_optimizers: list[Any] = [register_optimizer_step_pre_hook(outside(self.others.steps))]
        engine.unhook.callback(self.remove)
        with or_abandon(engine):
            for optimizer in engine.setup.optimizers:
                before: Any = optimizer.register_step_pre_hook(outside(self._before_step))
                hooks: Any = optimizer._optimizer_step_pre_hooks
                hooks.move_to_end(before.id, last=False)  # other hooks must see what has landed
                self._of_optimizers += [before, optimizer.register_step_post_hook(outside(self._after_step))]
                # Count backward passes at one parameter until the optimizer has state. Later steps are never blank.
                params = [p for p in params_of(optimizer) if p.requires_grad][-1:]
                count = partial(self._passed, optimizer)
                self._watches[optimizer] = [p.register_post_accumulate_grad_hook(count) for p in params]
            self.follow()
        engine.rebuilt = self.follow

    def follow(self) -> None:
        """Hook the parameters in the engine's buckets of gradients, and remove the hooks of all other parameters."""
        buckets = [bucket for runner in self.engine.backward.runners for bucket in runner.buckets]
        views = {p: view for bucket in buckets for p, view in zip(bucket.params, bucket.views, strict=True)}
        for landings in self.engine.landings.values():
            landings.follow(views)
        for p in self._of_params.keys() - views.keys():
            self._of_params.pop(p).remove()
        for p in [p for p in views if p not in self._of_params]:
            self._of_params[p] = hooked(p, self.engine)

    def _passed(self, optimizer: Optimizer, _: Any) -> None:
        landings = self.engine.landings[optimizer]
        landings.passes += 1
        if landings.passes == UNSTEPPED and not self.engine.backward.runners:
            self.others.waits(optimizer)

    def remove(self) -> None:
        for hook in (*self._of_params.values(), *chain(*self._watches.values()), *self._of_optimizers):
            hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Prepare a step. If the step has a closure, return new (args, kwargs), else None. args[0] is the optimizer."""
        engine, backward = self.engine, self.engine.backward
        if engine.runtime.monitor.error is not None:
            engine.check()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self.others.ours = True
        landings = engine.landings[optimizer]
        if closure is None and not landings.passes and landings.is_blank():
            self._blank = True
            return None
        if backward.task is not None:
            backward.drop_failed()
        if self._evaluating:  # the closure of the previous step failed, so that this step is new
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
        """Call a step's closure, and return the result. An optimizer may call the closure several times in a step."""
        self._evaluating = True
        result = closure()
        self._evaluating = False
        self._check_gradients(optimizer)
        self.engine.landings[optimizer].stepped()  # these gradients are used now; the closure may be called again
        return result

    def _check_gradients(self, optimizer: Optimizer) -> None:
        engine, backward = self.engine, self.engine.backward
        for p in engine.landings[optimizer].strange(backward.touched) if backward.runners else ():
            rules = [each.rule for each in engine.acting() if id(p) in each.ids]
            if rules and p.grad is not None and p.grad.any():  # zeros may come from zero_grad(set_to_none=False)
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
        elif not engine.begun:  # a backward failed before the step, but the closure's backward did not
            engine.begin_step()
        engine.stepped.add(optimizer)
        engine.backward.divided = len(engine.stepped) < len(engine.runtime.setup.optimizers)
        if not engine.backward.divided:
            engine.stepped.clear()
            engine.backward.dropped = False
            if not dropped:
                engine.end_step()
