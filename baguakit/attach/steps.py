"""Weights: flights launched and landed at the boundaries of optimizer steps."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .clock import BEGIN, END, Clock
from .freerunning import FreeRunner
from .routes import WeightRoute
from .seeing.logbook import Logbook


class Steps:
    """Where training is between two optimizer steps.

    A step begins before the first of the optimizers steps, and ends when the last of them has.
    """

    def __init__(
        self,
        routes: Sequence[WeightRoute],
        runners: Sequence[FreeRunner],
        optimizers: Sequence[Optimizer],
        clock: Clock,
        log: Logbook,
    ) -> None:
        self.routes, self.runners, self.optimizers, self.clock = routes, runners, optimizers, clock
        self.log = log
        self.begun = False
        self.stepped: set[int] = set()
        self.loaded: int | None = None  # the step of a checkpoint, which says what stages remember from there on

    @torch.no_grad()
    def before(self) -> None:
        """An optimizer is about to step."""
        if not self.begun:
            self.begun = True
            for route in self.routes:
                if route.rule.window == "between_steps" and route.air:
                    route.land_all()
            if setting_out := [route for route in self.routes if self.sets_out(route)]:
                self.clock.ask(BEGIN)
                for route in setting_out:
                    route.make_states()

    def sets_out(self, route: WeightRoute) -> bool:
        """Whether a rule takes its first step, with copies of the weights to make: they follow an outside load."""
        first = self.clock.step == route.rule.start and route.round == 0
        known = self.loaded is not None and self.loaded >= route.rule.start
        return first and not known and route.rule.stage.copies_weights()

    @torch.no_grad()
    def after(self, optimizer: Optimizer) -> bool:
        """An optimizer has stepped; returns whether the step has ended."""
        if not self.begun:  # it was given a closure, and did not call it
            self.before()
        self.stepped.add(id(optimizer))
        if len(self.stepped) < len(self.optimizers):
            return False
        self.begun = False
        self.stepped.clear()
        self.end()
        return True

    def skip(self, optimizer: Optimizer) -> bool:
        """An optimizer has stepped without gradients, since a backward failed; returns whether that was the last."""
        self.stepped.add(id(optimizer))
        if len(self.stepped) < len(self.optimizers):
            return False
        self.stepped.clear()
        return True

    def end(self) -> None:
        """The last optimizer has stepped: land what is due, exchange, and launch what flies on."""
        step = self.clock.step
        if self.routes:
            self.clock.ask(END)
        for route in self.routes:
            if route.rule.delay and route.air and route.rule.exchanges(step - route.rule.delay):
                route.land_all()
        for route in self.routes:
            if route.rule.window == "after_step" and route.rule.exchanges(step):
                route.launch_all(step, keep=route.rule.delay > 0)
                if route.rule.delay == 0:
                    route.land_all()
        self.log.step_ended(step)
        self.clock.step = step + 1
        self.launch_between()
        for runner in self.runners:
            runner.step_ended(self.clock.step)

    @torch.no_grad()
    def launch_between(self) -> None:
        """Launch the exchanges that land when the next step begins."""
        for route in self.routes:
            if route.rule.window == "between_steps" and route.rule.exchanges(self.clock.step) and not route.air:
                route.launch_all(self.clock.step, keep=True)


def and_then(closure: Callable[[], Any], act: Callable[[], None]) -> Callable[[], Any]:
    """`closure`, with `act()` after its first call.

    An optimizer that is given a closure evaluates the loss within its step: what lands there must find the gradients
    taken, as it does where the loss is evaluated before the step.
    """
    acted = False

    def both() -> Any:
        nonlocal acted
        result = closure()
        if not acted:
            acted = True
            act()
        return result

    return both
