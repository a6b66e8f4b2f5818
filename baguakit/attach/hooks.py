"""The hooks of an attachment on parameters and optimizers: they drive its engine."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .engine import Engine
from .runners.runner import check_unconverted
from .training.logbook import part_of
from .training.steps import with_callback


class Hooks:
    """The hooks of an attachment.

    They are set when this is made, follow the parameters of the engine's buckets, and are taken out when its runtime
    ends.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.others = engine, engine.other_optimizers
        self._of_params: dict[Tensor, Any] = {}
        self._of_optimizers: list[Any] = [register_optimizer_step_post_hook(self.others.stepped)]
        engine.runtime.unhook.append(self.remove)
        with engine.runtime.or_abandon():
            for optimizer in engine.setup.optimizers:
                before: Any = optimizer.register_step_pre_hook(self._before_step)
                hooks: Any = optimizer._optimizer_step_pre_hooks
                hooks.move_to_end(before.id, last=False)  # other hooks must find what has landed
                self._of_optimizers += [before, optimizer.register_step_post_hook(self._after_step)]
            self.follow()
        engine.rebuilt = self.follow

    def follow(self) -> None:
        """Hook the parameters of the engine's buckets of gradients, and no others."""
        backward = self.engine.backward
        backward.landed = self._gradients_landed
        params = dict.fromkeys(p for runner in backward.runners for p in runner.params())
        for p in [p for p in self._of_params if p not in params]:
            self._of_params.pop(p).remove()
        for p in params:
            if p not in self._of_params:
                self._of_params[p] = self._hook(p)

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

        handle: Any = p.register_post_accumulate_grad_hook(accumulated)
        return handle

    def remove(self) -> None:
        """Take all hooks out."""
        for hook in (*self._of_params.values(), *self._of_optimizers):
            hook.remove()

    def _gradients_landed(self) -> None:
        engine = self.engine
        if engine.backward.dropped:
            return
        engine.follow_parameters()
        if not engine.runtime.setup.optimizers:  # then every backward that lands is a step
            engine.log.step_ended(engine.clock.step)
            engine.clock.step += 1
            self._step_ended()
        else:
            self.others.landed(engine.backward.passes)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Return the arguments of the step, the optimizer being the first, where they must change; else None."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"{type(optimizer).__name__} steps within a backward, before the gradients of all ranks have landed; "
                "step when backward has returned"
            )
        engine = self.engine
        engine.check()
        self.others.ours = True
        engine.backward.drop_failed()
        if not engine.steps.begun:
            check_unconverted(engine.steps.runners, engine.runtime.setup.names)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._begin_step()
            engine.log.begin(part_of(optimizer))
            return None
        engine.log.begin(part_of(optimizer))
        followed = with_callback(closure, self._begin_step)
        return ((args[0], followed, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": followed})

    def _begin_step(self) -> None:
        if not self.engine.backward.dropped:
            self.engine.follow_parameters()
            self.engine.steps.before()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        engine = self.engine
        steps, dropped = engine.steps, engine.backward.dropped
        self.others.ours = False
        engine.log.end(part_of(optimizer))
        if not steps.begun and not dropped:  # it was given a closure, and did not call it
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
        if self.engine.comm.membership is not None:
            self.engine.keep_step()
        for listener in list(self.engine.listeners):
            listener()
