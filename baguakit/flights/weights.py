"""Runners of rules on weights: all buckets are launched together, and landed together.

No rank waits for a free-running rule:

    x ← x + (mean of the x that were launched − x that this rank launched).

Ranks are at different steps, so they first agree on each flight. They agree on the host, on a thread, and each rank
reads the result at the end of its steps. So nothing reads device memory, and a GPU waits for other ranks for a few
steps of the slowest rank at most. Again and again, all ranks gather what each says of each rule (`Said`), until a rule
has its quorum of ranks that are ready. A rank that has finished continues to answer, until no rank trains any more.
All launch the flight at the ends of their steps: a rank that was not ready contributes nothing, and lands the result.

A program may also call collectives in each step, for example in SyncBatchNorm. Its ranks must launch the flight in the
same step: NCCL kernels that are launched in different orders wait for each other for ever. So two all-reduces follow:

    what all say      the last of these gathers ends when all ranks have joined
    max c             c: the rank's step when it knows what all say
    max d, min d      d: the rank's step when it has max c

In such a program ranks are never more than a step apart. Every c was read before any d, so max c ≤ min d + 1, however
late messages are. If max c ≤ min d + `AHEAD`, all ranks launch in the step max d + 1. Otherwise there are stragglers,
so the program has no such collectives: each rank launches at once. In the step d + 1 a rank waits for max d and min d:
for 16 bytes from the network, not for steps of other ranks.
"""

import threading
import time
from collections.abc import Sequence
from math import floor, inf
from operator import mul
from typing import NamedTuple

import torch
from torch.distributed import ReduceOp

from ..comm import Comm, row_of, weights_of
from ..kernels.operators import land_, mix_
from ..monitor import Collective
from ..rules import Rule
from ..runtime.runtime import Channel
from ..schedules import BySpeed
from .runner import RuleRunner


class WeightRunner(RuleRunner):
    """A runner of a rule on weights."""

    launched: int | None = None  # the step of the latest launch; None if a checkpoint does not tell it
    weight: float = 0.0  # of this rank's steps since it last contributed, if a function gives the weight of each step
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

    def launch_all(self, step: int | None, keep: bool, counted: bool = True, source: int | None = None) -> None:
        """Launch all buckets; `keep` a copy if only their change is to land. For `source` see `launch`.

        If the rank is not `counted`, an anchor is launched in the place of the weights, so that its change lands.
        """
        self.launched, anchored = step, self.rule.stage.anchored
        for i, bucket in enumerate(self.buckets):
            flat = bucket.load("data")
            if anchored and not counted:
                flat.copy_(self.states[i]["anchor"])
            before = flat.clone() if keep else None
            self.launch(i, step, before=before, source=source)
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
PAUSE = 0.05  # seconds between two questions whether enough ranks are ready


class Said(NamedTuple):
    """The words of a rank about a rule in an agreement."""

    there: float  # 1, but 0 once the rule has ended on this rank
    ready: float  # the seconds since the rank was ready to contribute; -1 if it is not
    weight: float  # of its contribution
    speed: float  # its steps per second
    round: float  # that it will launch; less than others' after it has loaded an older state
    node: float = 0.0  # of the rank, and its place in it
    place: float = 0.0


class Agreed(NamedTuple):
    rule: int  # its place among the rules; -1: no rank trains any more
    said: Sequence[Said]  # by rank, of this rule
    step: float  # in which all ranks launch it; a rank that has passed this step or makes none launches at once


class Pace:
    """The steps of this rank from one contribution to the next, in one rule."""

    def __init__(self, runner: WeightRunner, weight: float | None = 1.0) -> None:
        self.runner, self.rule = runner, runner.rule
        self.weight = weight  # of this rank; None: that of its steps since it last contributed
        self.acts = self.there = True
        self.steps, self.since = 0, time.monotonic()  # since the latest contribution
        self.length: int | None = self.rule.offset or None  # in steps, of this round; None: not known yet
        self.most = 0  # steps of a round by speed; 0: the ranks do not know their speeds yet
        self.speed = 0.0  # in steps per second
        self.ready = inf  # the time since which the rank is ready
        self.rested = -inf  # the time when the last flight landed

    def step_ended(self, step: int) -> None:
        """Count a step, after which `step` steps are made, and find out whether the rank is ready."""
        self.acts, before = self.rule.acts(step), max(0, step - 1)
        self.there = self.acts or not self.rule.begun(step)
        if not self.acts:
            self.ready = inf
        elif self.rule.acts(before):
            self.steps += 1
            self.speed = self.steps / max(time.monotonic() - self.since, 1e-9)
            pause = self.rule.interval
            rests = pause > 0 and (bool(self.runner.air) or time.monotonic() - self.rested < pause)
            if self.ready == inf and not rests and self._is_due(before):
                self.ready = time.monotonic()

    def _is_due(self, step: int) -> bool:
        every = self.rule.every
        if isinstance(every, BySpeed):
            return self.steps >= (self.most or every.most)
        if self.rule.decides:
            return self.rule._is_due(step, self.runner.channel.comm.at(self.runner.round, step))
        if self.length is None:
            self.length = every if isinstance(every, int) else self.rule._length(max(0, step - self.steps + 1))
        return self.steps >= self.length

    def says(self) -> Said:
        ready, weight = time.monotonic() - self.ready, self.runner.weight if self.weight is None else self.weight
        weight, *place = row_of(weight, self.runner.channel.comm)
        wait = max(ready, 0.0) if ready > -inf else -1.0
        return Said(self.there, wait, weight, self.speed, self.runner.round, *place)

    def launch(self, said: Sequence[Said], rank: int) -> None:
        """Launch the flight agreed on, with the weights of ranks that count: they are ready, with the newest state."""
        latest, mine = max(each.round for each in said), said[rank]
        oldest = min(each.round for each in said)
        if self.rule.stage.anchored and 0 == oldest < latest:
            raise ValueError(
                f"ranks have loaded states from before and after the first exchange of {self.rule!r}, and those from "
                "before lack what it remembers; load states that were saved together"
            )
        source = next(r for r, each in enumerate(said) if each.round == latest) if oldest < latest else None
        self.runner.round = int(latest)
        count = [each.ready >= 0 and each.round == latest for each in said]
        some = any(map(mul, (each.weight for each in said), count))  # else all that count are alike
        rows = [(c * (each.weight if some else 1), each.node, each.place) for c, each in zip(count, said, strict=True)]
        weights = weights_of(rows)
        self.runner.weights = lambda: weights
        if isinstance(self.rule.every, BySpeed) and mine.speed:
            self.most = max(1, floor(self.rule.every.most * mine.speed / max(each.speed for each in said)))
        self.runner.launch_all(None, keep=True, counted=count[rank], source=source)
        if count[rank]:
            if self.weight is None:
                self.runner.weight -= mine.weight
            self.steps, self.since, self.length, self.ready = 0, time.monotonic(), None, inf


def chosen(said: Sequence[Sequence[Said]], rules: Sequence[Rule]) -> int | None:
    """Return the rule that is due and waits longest, of what ranks say; -1 if all have ended; None if none is due."""
    waits: list[tuple[float, int]] = []
    for i, (rule, *column) in enumerate(zip(rules, *said, strict=True)):
        there, ready = sum(each.there > 0 for each in column), sum(each.ready >= 0 for each in column)
        longest, grace = max(each.ready for each in column), inf if rule.grace is None else rule.grace
        if ready and (ready >= min(rule.quorum or there, there) or longest >= grace):
            waits.append((longest, i))
    return max(waits)[1] if waits else None if any(each.there for row in said for each in row) else -1


class FreeRunner:
    """The free-running rules on a rank: they rest, agree over `host` on a flight, wait for its launch, or one flies."""

    def __init__(self, runners: Sequence[WeightRunner], host: Channel, weight: float | None = 1.0) -> None:
        self.paces, self.host = [Pace(each, weight) for each in runners], host
        self.monitor = runners[0].channel.monitor
        self.agreement: Collective | None = None
        self.agreed: Agreed | None = None
        self.over = False  # no rank trains any more
        self.step = 0.0  # steps of the rules that have ended here, none of a checkpoint's; infinite: all
        self.limit = inf  # the step in which this rank waits for the agreement
        self.lock = threading.Lock()  # of the step and the limit

    def step_ended(self, step: int) -> None:
        """Call `advance` after an optimizer step, if a rule has begun; `step` is the next step."""
        if any(pace.rule.begun(step) for pace in self.paces):
            for pace in self.paces:
                pace.step_ended(step)
            self.advance(self.step + 1)

    @torch.no_grad()
    def advance(self, step: float) -> None:
        """Land a flight that has arrived (drop it after its rule); join the next agreement, and launch its flight."""
        self.monitor.check()
        with self.lock:
            self.step, due = step, step >= self.limit
        for pace in (each for each in self.paces if each.runner.air):
            if not all(flight.flight.done() for flight in pace.runner.air.values()):
                return
            pace.rested = time.monotonic()
            if pace.acts:
                pace.runner.land_all()
            else:  # training is over here: the weights stay as it left them
                pace.runner.drop()
        if self.over:
            return
        if self.agreement is None and self.agreed is None:
            self.join()
        if self.agreement is not None and (due or self.agreement.flight.done()):
            agreement, self.agreement, self.limit = self.agreement, None, inf
            self.agreed = self.monitor.wait_for(agreement)
        if self.agreed is not None and step >= self.agreed.step:
            agreed, self.agreed = self.agreed, None
            self.over = agreed.rule < 0
            if not self.over:
                self.paces[agreed.rule].launch(agreed.said, self.host.comm.rank)

    def join(self) -> None:
        label = f"the agreement on the next flight of {' + '.join(repr(pace.rule) for pace in self.paces)}"
        if self.host.comm.size > 1:
            self.agreement = self.host.begin(label, self.agree)
        elif (rule := chosen(said := [[pace.says() for pace in self.paces]], [p.rule for p in self.paces])) is not None:
            self.agreed = Agreed(rule, [row[rule] for row in said], -inf)

    def agree(self, comm: Comm) -> Agreed:
        """Return what all ranks agree on. Runs on the lane's thread."""
        rules = [pace.rule for pace in self.paces]
        while True:
            mine = torch.tensor([[pace.says() for pace in self.paces]], dtype=torch.float64)
            said = [[Said(*each) for each in row] for row in comm.all_gather(mine).tolist()]
            if (rule := chosen(said, rules)) is not None:
                break
            self.monitor.check()
            time.sleep(PAUSE)
            if self.agreement is not None:  # no rank is late
                self.agreement.launched = time.time()
        c = self.step
        latest = float(comm.all_reduce(torch.tensor([c if c < inf else -inf], dtype=torch.float64), ReduceOp.MAX))
        with self.lock:
            d, self.limit = self.step, self.step + 1
        ends = torch.tensor([d if d < inf else -inf, -d], dtype=torch.float64)
        most, least = comm.all_reduce(ends, ReduceOp.MAX).tolist()
        return Agreed(rule, [row[rule] for row in said], most + 1 if latest <= AHEAD - least else -inf)

    def finish(self) -> None:
        """Answer the other ranks until no rank trains any more. Call this when this rank has stopped training."""
        for pace in self.paces:
            pace.acts, pace.there, pace.ready = False, False, inf
        while not self.over:
            self.advance(inf)
            if not self.over:
                time.sleep(0.001)
