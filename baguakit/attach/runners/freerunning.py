"""Averaging that no rank waits for:  x ← x + (mean of the x that were launched − x that this rank launched).

Ranks are at different steps, so they agree on each flight first: a rank joins a one-element all-reduce on the host,
checks at the end of each step if all have joined, and launches only then. So a GPU spins for at most one step of the
slowest rank, and nothing reads device memory. Each rank contributes its weight, 1 while it trains; a rank that has
finished continues to answer, with weight 0, until the sum is 0.
"""

import time
from typing import Any

import torch

from ...comm import Comm
from ...lanes import Flight
from ..monitor import Collective
from .weights import WeightRunner

AGREEMENTS = 2  # the number of the agreements for the monitor, after those of the channels


class Agreement(Flight):
    """An all-reduce of the weights of the ranks, on the host. Its result is their sum."""

    def __init__(self, weight: int, host: Comm) -> None:
        self._weights = torch.tensor([weight], dtype=torch.float32)
        self._work: Any = host.all_reduce_later(self._weights)

    def done(self) -> bool:
        return self._error is not None or self._work is None or bool(self._work.is_completed())

    def result(self) -> int:
        if self._error is not None:
            raise self._error
        if self._work is not None:
            self._work.wait()
        return int(self._weights)


class FreeRunner:
    """A free-running rule on one rank: at rest, agreeing on a flight, or in the air.

    Args:
        runner: of the rule, on a channel of its own.
        host: a Comm whose group moves CPU tensors and is used for nothing else.
    """

    def __init__(self, runner: WeightRunner, host: Comm) -> None:
        self.runner, self.host, self.monitor = runner, host, runner.channel.monitor
        self.agreement: Collective | None = None
        self.weight = 0  # of this rank, in that agreement
        self.rested = float("-inf")  # the time when the last flight landed
        self.over = False  # no rank trains any more

    def step_ended(self, step: int) -> None:
        """Advance without waiting: an optimizer step has ended, and `step` is next."""
        if step >= self.runner.rule.start:
            self.advance(1 if self.runner.rule.acts(step) else 0)

    @torch.no_grad()
    def advance(self, weight: int) -> None:
        """Land what has arrived, launch what is agreed on, and join the agreement on the next flight. Never wait."""
        self.monitor.check()
        if self.over or (self.runner.air and not self.runner.arrived()):
            return
        if self.runner.air:
            self.land(weight)
        if self.agreement is None and (weight == 0 or time.monotonic() - self.rested >= self.runner.rule.interval):
            self.join(weight)
        if self.agreement is not None and self.agreement.flight.done():
            self.launch(self.agreement)

    def land(self, weight: int) -> None:
        self.rested = time.monotonic()
        if weight:
            self.runner.land_all()
        else:  # training is over here: the weights stay as it left them
            self.runner.drop()

    def join(self, weight: int) -> None:
        label = f"{self.runner.rule!r}, agreement on round {self.runner.round}"
        self.agreement, self.weight = Collective(label=label, flight=Agreement(weight, self.host)), weight
        self.monitor.launched(AGREEMENTS, self.agreement)

    def launch(self, agreement: Collective) -> None:
        self.agreement = None
        training = self.monitor.wait_for(agreement)
        if training == 0:
            self.over = True
        else:
            self.runner.launch_all(None, keep=True, factor=self.weight * self.host.size / training)

    def finish(self) -> None:
        """Answer the other ranks until none trains any more: this one has stopped."""
        while not self.over:
            self.advance(0)
            if not self.over:
                time.sleep(0.001)
