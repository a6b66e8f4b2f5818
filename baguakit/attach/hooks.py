"""The hooks of an attachment on parameters and optimizers: they drive its engine."""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..flights import check_unconverted, part_of
from .engine import Engine
from .landings import params_of

UNSTEPPED = 1000  # backward passes: more than are accumulated for a step


class Hooks:
    """The hooks of an attachment.

    They are set when this is made, follow the parameters of the engine's buckets, and are taken out when its runtime
    ends.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.others = engine, engine.other_optimizers
        self._of_params: dict[Tensor, Any] = {}
        self._watches: dict[Optimizer, list[Any]] = {}  # hooks that count backward passes
        self._evaluating = False  # a closure, or one has raised
        self._blank = False  # the step under way is none
        self._copies = dict.fromkeys(engine.setup.optimizers if engine.steps.runners else ())  # those not looked at
        # torch.compile of a step leaves them out. By a decorator, the compiler would be imported with the package.
        outside: Any = torch.compiler.disable
        self._of_optimizers: list[Any] = [register_optimizer_step_pre_hook(outside(self.others.steps))]
        engine.runtime.unhook.append(self.remove)
        with engine.runtime.or_abandon():
            for optimizer in engine.setup.optimizers:
                before: Any = optimizer.register_step_pre_hook(outside(self._before_step))
                hooks: Any = optimizer._optimizer_step_pre_hooks
                hooks.move_to_end(before.id, last=False)  # other hooks must find what has landed
                self._of_optimizers += [before, optimizer.register_step_post_hook(outside(self._after_step))]
                self._watches[optimizer] = self._watch(optimizer)
            self.follow()
        engine.rebuilt = self.follow

    def follow(self) -> None:
        """Hook the parameters of the engine's buckets of gradients, and no others."""
        backward = self.engine.backward
        backward.landed = self._gradients_landed
        self.engine.landings.follow(backward.runners)
        params = dict.fromkeys(p for runner in backward.runners for p in runner.params())
        for p in [p for p in self._of_params if p not in params]:
            self._of_params.pop(p).remove()
        for p in params:
            if p not in self._of_params:
                self._of_params[p] = self._hook(p)

    def _watch(self, optimizer: Optimizer) -> list[Any]:
        """Count backward passes, by one parameter, until the optimizer steps and has state: then no step is none."""
        came = self.engine.landings.came

        def counted(_: Any) -> None:
            came[optimizer] += 1
            if came[optimizer] == UNSTEPPED and not self.engine.backward.runners:
                self.others.waits(optimizer)

        params = [p for p in params_of(optimizer) if p.requires_grad]
        return [p.register_post_accumulate_grad_hook(counted) for p in params[-1:]]

    def _hook(self, p: Tensor) -> Any:
        """Hook a parameter, behind all other hooks of it: they may change the gradient, whenever they were registered.

        In the backward that finds another one behind, the gradient counts as the last of its bucket; in the next, this
        one is behind again.
        """

        def accumulated(p: Any) -> None:
            hooks = p._post_accumulate_grad_hooks
            behind = next(reversed(hooks)) == handle.id
            if not behind:
                hooks[handle.id] = hooks.pop(handle.id)  # torch calls them in the order of insertion
            self.engine.backward.gradient_ready(p, behind)  # of the runners of the time

        trains = p.requires_grad  # else it has been taken in frozen, with a loaded state, and torch hooks none
        handle: Any = p.requires_grad_().register_post_accumulate_grad_hook(accumulated)
        p.requires_grad_(trains)
        return handle

    def remove(self) -> None:
        """Take all hooks out."""
        for hook in (*self._of_params.values(), *chain(*self._watches.values()), *self._of_optimizers):
            hook.remove()

    def _gradients_landed(self, params: list[int]) -> None:
        engine = self.engine
        if engine.backward.dropped:
            return
        engine.landings.landed(params)
        engine.follow_parameters()
        if not engine.runtime.setup.optimizers:  # then every backward that lands is a step
            engine.log.step_ended(engine.clock.step)
            engine.clock.step += 1
            self._step_ended()
        else:
            self.others.landed(engine.backward.passes)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Return the arguments of the step, the optimizer being the first, where they must change; else None."""
        engine, steps, backward = self.engine, self.engine.steps, self.engine.backward
        engine.check()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self.others.ours = True
        if closure is None and engine.landings.is_blank(optimizer):
            self._blank = True
            return None
        backward.drop_failed()
        if self._evaluating:  # what has failed was in the closure: that step is over
            self._evaluating = backward.dropped = steps.begun = False
        if not steps.begun:
            check_unconverted(steps.runners, engine.runtime.setup.names)
        if optimizer in self._copies:
            self._copies[optimizer] = self.others.sample(optimizer)
        evaluates = callable(closure)
        if not backward.dropped:
            engine.follow_parameters()
            steps.before(land=not evaluates)
        engine.log.begin(part_of(optimizer))
        if not evaluates:
            if backward.runners:
                self._check_gradients(optimizer)
            return None
        followed = partial(self._evaluate, optimizer, closure)
        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call the closure of a step, once or once more."""
        self._evaluating = True
        result = closure()
        self._evaluating = False
        if self.engine.backward.runners:
            self._check_gradients(optimizer)
            self.engine.landings.stepped(optimizer)  # with these gradients, and it may evaluate again
        return result

    def _check_gradients(self, optimizer: Optimizer) -> None:
        """Raise a RuntimeError if an optimizer is about to step with a gradient that should have landed and has not."""
        engine = self.engine
        backward, step = engine.backward, engine.clock.step
        for p in engine.landings.strange(optimizer, backward.touched):
            rules = [each.rule for each in backward.runners if each.rule.acts(step) and id(p) in each.ids]
            if rules and p.grad is not None and p.grad.any():  # zeros are those of zero_grad(set_to_none=False)
                raise RuntimeError(
                    f"{type(optimizer).__name__} steps with a gradient of {engine.setup.names[p]} that {rules[0]!r} "
                    "has not averaged: no backward outside att.no_sync() has brought it since the last step; call "
                    "att.average_() when gradients have been put into .grad in another way"
                )

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        engine = self.engine
        steps, dropped = engine.steps, engine.backward.dropped
        self.others.ours = False
        if self._blank:
            self._blank = False
            return
        engine.log.end(part_of(optimizer))
        engine.landings.stepped(optimizer)
        watches = self._watches[optimizer]
        while watches and optimizer.state:
            watches.pop().remove()
        if optimizer in self._copies:
            self.others.look_for_copies(optimizer, self._copies.pop(optimizer))
        if dropped:
            steps.begun = False
        elif not steps.begun:  # a closure has made up for a backward that failed
            steps.before()
        engine.backward.divided = not (last := steps.is_last(optimizer))
        if last:
            engine.backward.dropped = False
            if not dropped:
                steps.end()
                self._step_ended()

    def _step_ended(self) -> None:
        self.engine.backward.step_ended()
        if self.engine.backward.arrived is not None:
            self.engine.follow_gradients()
        if self.engine.comm.membership.changes:
            self.engine.keep_step()
        for listener in list(self.engine.listeners):
            listener()
