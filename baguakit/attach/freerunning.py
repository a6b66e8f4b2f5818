"""Averaging that nobody waits for:  x ← x + (mean of the x that were launched − x that this rank launched).

Ranks are at different steps, so each flight is agreed on first: every rank that comes by joins a one-element
all-reduce on the host, looks at the ends of its steps whether all have joined, and launches only then. So a GPU spins
for at most one step of the slowest rank, and nothing reads device memory. What the ranks bring to the agreement is
their weight, 1 while they train; one that has finished goes on answering, with weight 0, until the sum is 0.
"""

import time
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import Comm
from ..lanes import Flight
from .monitor import Monitor
from .routes import WeightRoute

VOTES = 2  # the monitor's number for agreements, beside those of the lanes


@dataclass(eq=False)
class Vote(Flight):
    """An agreement under way; for the monitor, a flight of its own."""

    weights: torch.Tensor  # (1,): this rank's weight, and when all have joined, the sum
    weight: int
    work: Any
    launched: float
    rule: str
    ordinal: int
    error: BaseException | None = None
    step: int | None = None  # ranks are at different ones

    @property
    def flight(self) -> Flight:
        return self

    def done(self) -> bool:
        return self.error is not None or self.work is None or bool(self.work.is_completed())

    def fail(self, error: BaseException) -> None:
        self.error = error

    def result(self) -> int:
        if self.error is not None:
            raise self.error
        if self.work is not None:
            self.work.wait()
        return int(self.weights)

    def __str__(self) -> str:
        return f"{self.rule}, agreement on round {self.ordinal}"


class FreeRunner:
    """A free-running rule on one rank: at rest, agreeing on a flight, or in the air.

    Args:
        route: the rule and its buckets, on a track of its own.
        host: a Comm whose group moves CPU tensors and is used for nothing else.
        monitor: told of each agreement.
    """

    def __init__(self, route: WeightRoute, host: Comm, monitor: Monitor) -> None:
        self.route, self.host, self.monitor = route, host, monitor
        self.vote: Vote | None = None
        self.rested = float("-inf")  # when the last flight landed
        self.over = False  # no rank trains any more

    def step_ended(self, step: int) -> None:
        """An optimizer step has ended, and `step` is next: go as far as can be gone without waiting."""
        if step >= self.route.rule.start:
            self.advance(1 if self.route.rule.acts(step) else 0)

    @torch.no_grad()
    def advance(self, weight: int) -> None:
        """Land what has arrived, launch what has been agreed on, and join the agreement on the next flight."""
        self.monitor.check()
        if self.over or (self.route.air and not self.route.arrived()):
            return
        if self.route.air:
            self.land(weight)
        if self.vote is None and (weight == 0 or time.monotonic() - self.rested >= self.route.rule.interval):
            self.join(weight)
        if self.vote is not None and self.vote.done():
            self.launch(self.vote)

    def land(self, weight: int) -> None:
        self.rested = time.monotonic()
        if weight:
            self.route.land_all()
        else:  # training is over here: the weights stay as it left them
            self.route.drop()

    def join(self, weight: int) -> None:
        weights = torch.tensor([weight])
        work = self.host.all_reduce_later(weights)
        self.vote = Vote(weights, weight, work, time.time(), repr(self.route.rule), self.route.round)
        self.monitor.launched(VOTES, self.vote)

    def launch(self, vote: Vote) -> None:
        self.vote = None
        try:
            training = vote.result()
        except Exception as error:
            self.monitor.reraise(error, vote)
        finally:
            self.monitor.landed(vote)
        if training == 0:
            self.over = True
        else:
            self.route.launch_all(None, keep=True, factor=vote.weight * self.host.size / training)

    def finish(self) -> None:
        """This rank trains no more: answer the others until none does."""
        while not self.over:
            self.advance(0)
            if not self.over:
                time.sleep(0.001)
