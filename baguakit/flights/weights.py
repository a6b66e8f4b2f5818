"""Runners of rules on weights: all buckets are launched together, and landed together.

No rank waits for a free-running rule:

    x ← x + (mean of the x that were launched − x that this rank launched).

Ranks are at different steps, so they first agree on each flight. They agree on the host, and each rank reads the result
at the end of its steps. So nothing reads device memory, and a GPU waits for other ranks for a few steps of the slowest
rank at most. Each rank contributes its weight: 1 while it trains. A rank that has finished continues to answer with
weight 0, until the sum of the weights is 0.

A program may also call collectives in each step, for example in SyncBatchNorm. Its ranks must launch the flight in the
same step: NCCL kernels that are launched in different orders wait for each other for ever. So an agreement is three
all-reduces of a few numbers, one after another on a thread:

    Σ weights         this all-reduce ends when all ranks have joined
    max c             c: the rank's step when it has Σ weights
    max d, min d      d: the rank's step when it has max c

In such a program ranks are never more than a step apart. Every c was read before any d, so max c ≤ min d + 1, however
late messages are. If max c ≤ min d + `AHEAD`, all ranks launch in the step max d + 1. Otherwise there are stragglers,
so the program has no such collectives: each rank launches at once. In the step d + 1 a rank waits for max d and min d:
for 16 bytes from the network, not for steps of other ranks.
"""

import threading
import time
from math import inf
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from ..comm import Comm
from ..kernels.operators import land_, mix_
from ..monitor import Collective
from ..runtime.runtime import Channel
from .runner import RuleRunner


class WeightRunner(RuleRunner):
    """A runner of a rule on weights."""

    launched: int | None = None  # the step of the latest launch; None if a checkpoint does not tell it
    _asked: tuple[int, bool] = (-1, False)

    def exchanges(self, step: int) -> bool:
        """Return whether the rule exchanges in this step. If `every` has a method `due`, it is called once per step."""
        if not self.rule.decides:
            return self.rule.exchanges(step)
        if self._asked[0] != step:
            due = not self.air and self.rule._is_due(step, self.channel.comm.at(self.round, step))
            self._asked = step, due
        return self._asked[1]

    def is_due(self, step: int) -> bool:
        launch = step - self.rule.delay
        return bool(self.air) and (self.rule.exchanges(launch) if self.launched is None else self.launched == launch)

    def launch_all(self, step: int | None, keep: bool, factor: float = 1.0) -> None:
        """Launch all buckets with the weights times `factor`; `keep` a copy if only their change is to land."""
        self.launched = step
        for i, bucket in enumerate(self.buckets):
            flat = bucket.load("data")
            before = flat.clone() if keep else None
            if factor != 1:
                flat.mul_(factor) if factor else flat.zero_()  # 0 · inf would not be 0
            self.launch(i, step, before=before)
        if self.in_phases:
            self.channel.lane.flush()
        self.round += 1

    def land_all(self) -> None:
        """Wait for every bucket in the air, and put its result into the weights.

        x ← result  where x equals `before`, the launched weights;  x ← x + (result − before)  where x has changed.
        Values are compared on the device, as a version counter would not see writes through `p.data`. A rule with
        `mix=α` has no `before`:  x ← α x + (1 − α) result. On a GPU x does not change if an abort ended the flight.
        """
        mix, fault = self.rule.mix, self.channel.monitor.fault
        held = [(self.buckets[i], self.air[i].before, self.arrive(i)) for i in sorted(self.air)]  # all, or none lands
        good = fault.good(self.buckets[0].flat.device) if fault else None
        for bucket, before, result in held:
            flat = bucket.flat
            x = bucket.now() if fault or mix or before is not None else flat
            if mix:
                result = flat.copy_(result) if result is not flat else flat
                mix_(result, [x], [1 - mix, mix])
            if before is not None:
                land_(x, result, before, good)
                result = x
            elif good is not None:
                result = torch.where(good, result.to(flat.dtype), x, out=flat)
            if result is not flat:
                flat.copy_(result)
            bucket.store("data")


AHEAD = 4  # steps by which the host of one rank may run ahead of others, where a GPU keeps the ranks together


class Agreed(NamedTuple):
    training: int  # the sum of the weights of the ranks; 0: none trains any more
    step: float  # in which all ranks launch it; a rank that has passed this step or makes none launches at once


class FreeRunner:
    """A free-running rule on one rank: it rests, agrees over `host` on a flight, waits for its launch, or flies."""

    def __init__(self, runner: WeightRunner, host: Channel) -> None:
        self.runner, self.host, self.monitor = runner, host, runner.channel.monitor
        self.agreement: Collective | None = None
        self.agreed: Agreed | None = None
        self.weight = 0  # of this rank, in that agreement
        self.rested = -inf  # the time when the last flight landed
        self.over = False  # no rank trains any more
        self.step = 0.0  # steps of the rule that have ended here, none of a checkpoint's; infinite: all
        self.limit = inf  # the step in which this rank waits for the agreement
        self.lock = threading.Lock()  # of the step and the limit

    def step_ended(self, step: int) -> None:
        """Call `advance` after an optimizer step, if the rule has begun; `step` is the next step."""
        if self.runner.rule.begun(step):
            self.advance(self.step + 1, 1 if self.runner.rule.acts(step) else 0)

    @torch.no_grad()
    def advance(self, step: float, weight: int) -> None:
        """Land arrived flights (if `weight` is 0, drop them); join the next agreement, and launch an agreed flight."""
        self.monitor.check()
        with self.lock:
            self.step, due = step, step >= self.limit
        if self.over or not all(flight.flight.done() for flight in self.runner.air.values()):
            return
        if self.runner.air:
            self.rested = time.monotonic()
            if weight:
                self.runner.land_all()
            else:  # training is over here: the weights stay as it left them
                self.runner.drop()
        rests = weight != 0 and time.monotonic() - self.rested < self.runner.rule.interval
        if self.agreement is None and self.agreed is None and not rests:
            self.join(weight)
        if self.agreement is not None and (due or self.agreement.flight.done()):
            agreement, self.agreement, self.limit = self.agreement, None, inf
            self.agreed = self.monitor.wait_for(agreement)
        if self.agreed is not None and step >= self.agreed.step:
            training, self.agreed = self.agreed.training, None
            self.over = training == 0
            if not self.over:
                self.runner.launch_all(None, keep=True, factor=self.weight * self.host.comm.size / training)

    def join(self, weight: int) -> None:
        self.weight, label = weight, f"{self.runner.rule!r}, agreement on round {self.runner.round}"
        if self.host.comm.size == 1:
            self.agreed = Agreed(weight, -inf)
        else:
            self.agreement = self.host.begin(label, lambda comm: self.agree(weight, comm))

    def agree(self, weight: int, comm: Comm) -> Agreed:
        """Return what all ranks agree on: the sum of weights, and the step of the launch. Runs on the lane's thread."""
        training = int(comm.all_reduce(torch.tensor([float(weight)])))
        c = self.step
        latest = float(comm.all_reduce(torch.tensor([c if c < inf else -inf], dtype=torch.float64), ReduceOp.MAX))
        with self.lock:
            d, self.limit = self.step, self.step + 1
        ends = torch.tensor([d if d < inf else -inf, -d], dtype=torch.float64)
        most, least = comm.all_reduce(ends, ReduceOp.MAX).tolist()
        return Agreed(training, most + 1 if latest <= AHEAD - least else -inf)

    def finish(self) -> None:
        """Answer the other ranks until no rank trains any more. Call this when this rank has stopped training."""
        while not self.over:
            self.advance(inf, 0)
            if not self.over:
                time.sleep(0.001)
