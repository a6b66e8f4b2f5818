"""Optimizer steps: at their boundaries, flights of weights are launched and landed."""

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from ..flights import Clock, FreeRunner, Logbook, Turn, WeightRunner


class Steps:
    """The boundaries of optimizer steps.

    A step begins before the first of the optimizers steps, and ends when the last of them has stepped.
    """

    def __init__(
        self,
        runners: Sequence[WeightRunner],
        free_runners: Sequence[FreeRunner],
        optimizers: Sequence[Optimizer],
        clock: Clock,
        log: Logbook,
    ) -> None:
        self.runners, self.free_runners, self.optimizers, self.clock = runners, free_runners, optimizers, clock
        self.log = log
        self.begun = False
        self.stepped: set[int] = set()
        self.loaded: int | None = None  # the step of the checkpoint that has been loaded

    def follow(self, other: "Steps") -> None:
        """Go on with the step of `other`, whose runners these replace."""
        self.begun, self.stepped, self.loaded = other.begun, other.stepped, other.loaded

    @torch.no_grad()
    def before(self, land: bool = True) -> None:
        """Begin a step, if it has not begun: an optimizer is about to step.

        What has flown since the last step lands now or, without `land`, when the step ends: an optimizer with a closure
        takes the gradients within its step, and it may move the weights before and put its own copy of them back.
        """
        if not self.begun:
            self.begun = True
            if land:
                self._land_between()
            if beginners := [runner for runner in self.runners if self.takes_first_step(runner)]:
                self.clock.announce(Turn.BEGIN)
                for runner in beginners:
                    runner.make_states()

    def _land_between(self) -> None:
        for runner in self.runners:
            if runner.rule.window == "between_steps" and runner.air:
                runner.land_all()

    def takes_first_step(self, runner: WeightRunner) -> bool:
        """Return True if a rule takes its first step and copies the weights: they may be others than at `attach`."""
        step, rule = self.clock.step, runner.rule
        first = runner.round == 0 and rule.begun(step) and not rule.begun(step - 1)
        known = self.loaded is not None and rule.begun(self.loaded)
        return first and not known and rule.stage.copies_weights()

    def is_last(self, optimizer: Optimizer) -> bool:
        """Record that an optimizer has stepped. Return True if all have, so that the step ends."""
        self.stepped.add(id(optimizer))
        if len(self.stepped) < len(self.optimizers):
            return False
        self.stepped.clear()
        return True

    @torch.no_grad()
    def end(self) -> None:
        """End a step: land the flights that are due, exchange, and launch those that outlast the step."""
        step, self.begun = self.clock.step, False
        if self.runners:
            self.clock.announce(Turn.END)
        try:
            if self.runners:
                self._land_between()
                self._exchange(step)
        finally:  # the optimizer has stepped, even if the exchange after it has been lost
            self.log.step_ended(step)
            self.clock.step = step + 1
        self.launch_between()
        for free_runner in self.free_runners:
            free_runner.step_ended(self.clock.step)

    def _exchange(self, step: int) -> None:
        for runner in self.runners:
            if runner.rule.delay and runner.is_due(step):
                runner.land_all()
        for runner in self.runners:
            if runner.rule.window == "after_step" and runner.exchanges(step):
                runner.launch_all(step, keep=runner.rule.delay > 0 and runner.rule.mix is None)
                if runner.rule.delay == 0:
                    runner.land_all()

    @torch.no_grad()
    def launch_between(self) -> None:
        """Launch the flights that land when the next step begins, unless one is under way."""
        for runner in () if self.begun else self.runners:
            if runner.rule.window == "between_steps" and runner.exchanges(self.clock.step) and not runner.air:
                runner.launch_all(self.clock.step, keep=True)
