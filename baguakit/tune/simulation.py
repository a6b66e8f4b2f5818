"""A virtual cluster: the goodput of an algorithm on machines of unequal speed that are lost and come back.

Virtual time goes from one change of the group to the next. In between all rounds are alike, and take the seconds that
`predict` gives for the n ranks that are present:

    rules that wait   every rank takes the step of the slowest machine present; a round is the longest `every` of steps
    free_running      every rank takes its own step; rounds begin by `quorum` and `grace`, and take no less than a step
                      of the slowest, a flight, and the interval
    a loss            undoes the step under way on all ranks, and what the lost rank did since the last landing
    every change      stops all ranks for the seconds `regroup`; if all are lost, the next resumes from a checkpoint

    goodput = tokens of the steps that were not lost / tokens that all machines compute alone, if none is ever lost
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, count
from math import ceil, inf
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from torch import nn

from ..arguments import Declared, Positive, Range, checked
from ..costs import Network, Timeless
from ..elastic.virtual import Begin, Spell, trained
from ..pictures import blank, set_frame
from ..ranks import Ranks
from ..rules import Algorithm, together
from ..schedules import BySpeed
from ..stages import Hierarchical
from .planning import Described, Rate, check
from .prediction import every_of, lasting, predict
from .probing import Compute

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST, POINTS = 16, 200  # ranks that train for losses; points of a picture
NEARLY = 1e-6  # of a step or a round: rounding errors of virtual time
Seconds = Annotated[float, Range(0)]


@dataclass(frozen=True)
class Machine(Declared):
    """A kind of machine. Each has one rank.

    Attributes:
        name: the name of the kind.
        step: the time of a step without communication: a `Compute`, or seconds, of which forward takes a third.
        count: the number of these machines.
        tokens: tokens, or samples, of a step.
        mtbf: the mean of the exponentially distributed seconds until such a machine is lost; None: never.
        away: the seconds until a lost machine is back.
    """

    name: str
    step: Rate | Compute
    count: Positive = 1
    tokens: Rate = 1.0
    mtbf: Rate | None = None
    away: Seconds = 0.0

    @property
    def compute(self) -> Compute:
        """Return the step as a `Compute`."""
        return self.step if isinstance(self.step, Compute) else Compute(self.step / 3, 2 * self.step / 3)


class Event(NamedTuple):
    """A change after `seconds`. `what` befell a `machine`: "lost" or "back". `present` ranks then had `tokens`."""

    seconds: float
    what: str
    machine: str
    present: int
    tokens: float


@dataclass(frozen=True, repr=False)
class Simulation(Declared):
    """The result of `simulate`. Print it, or draw it.

    Attributes:
        algorithm, machines, seconds: as given.
        tokens: tokens of the steps that were not lost.
        rounds: the number of exchanges, of the least frequent rule.
        availability: the share of time for which a machine was present, the mean of all.
        events: every change of the group, in order.
        losses: (seconds, mean training loss of all ranks) of each step; empty if no losses were asked for.
    """

    algorithm: Algorithm
    machines: tuple[Machine, ...]
    seconds: float
    tokens: float
    rounds: int
    availability: float
    events: tuple[Event, ...] = ()
    losses: tuple[tuple[float, float], ...] = ()

    @property
    def goodput(self) -> float:
        """Return `tokens`, divided by the tokens that all machines compute alone if none is ever lost."""
        return self.tokens / sum(self.seconds * m.count * m.tokens / m.compute.seconds for m in self.machines)

    def __str__(self) -> str:
        kinds = ", ".join(f"{each.count} × {each.name}" for each in self.machines)
        lost = sum(each.what == "lost" for each in self.events)
        rows = {"goodput": f"{self.goodput:.3f}", "availability": f"{self.availability:.3f}"}
        rows |= {"tokens": f"{self.tokens:.5g}", "rounds": f"{self.rounds:,}", "losses of machines": f"{lost:,}"}
        rows |= {"last loss": f"{self.losses[-1][1]:.4f}"} if self.losses else {}
        shown = [f"    simulated {name:<20}{value:>18}" for name, value in rows.items()]
        return "\n".join([f"{self.algorithm!r}, {self.seconds:,.0f} simulated seconds on {kinds}", *shown])

    __repr__ = __str__

    def draw(self) -> "Figure":
        """Draw goodput and the share of machines that are present against time, and any losses below."""
        figure = blank(7.0, 4.6 if self.losses else 2.8)
        panels = figure.subplots(1 + bool(self.losses), sharex=True, squeeze=False).flatten()
        machines, t = sum(each.count for each in self.machines), np.linspace(0.0, self.seconds, POINTS + 1)
        moments = [0.0, *(each.seconds for each in self.events), self.seconds]
        present = [machines, *(each.present for each in self.events)]
        tokens = np.interp(t, moments, [0.0, *(each.tokens for each in self.events), self.tokens])
        panels[0].step(moments, np.array([*present, present[-1]]) / machines, where="post", label="present")
        panels[0].plot(t[1:], np.diff(tokens) * POINTS * self.goodput / (self.tokens or 1.0), label="goodput")
        panels[0].set(ylim=(0, 1.05), ylabel="simulated share")
        for axes in panels[1:]:
            axes.plot(*zip(*self.losses, strict=True))
            axes.set(ylabel="simulated loss")
        for axes in panels:
            set_frame(axes)
        panels[-1].set(xlabel="simulated seconds", xlim=(0, self.seconds))
        set_frame(panels[0], "upper center", ncols=2)
        return figure


class Pace(NamedTuple):
    """By kind of machine: the seconds of a step, and the steps between contributions; and the seconds of a round."""

    steps: list[float]
    lengths: list[float]
    round: float


def paces(
    algorithm: Algorithm, model: nn.Module, network: Network, kinds: Sequence[Machine], options: Sequence[Any]
) -> Callable[[Sequence[int]], Pace]:
    """Return a function of the counts of all kinds of machines that are present. `options`: buckets and flows."""
    rules, computes, idle = lasting(algorithm.rules), [each.compute for each in kinds], Compute(0.0, 0.0)
    rule = max(rules, key=every_of)
    H, free = every_of(rule), all(each.window == "free_running" for each in rules)
    often = together(replace(each, every=1, offset=0, quorum=None, grace=None) if free else each for each in rules)

    @cache
    def rows(n: int) -> tuple[list[float], list[float]]:
        """Return by kind the seconds of a step, and the least of a round of n free-running ranks if it is slowest."""
        check(algorithm, Described(n, network.per_node))
        timeless = Timeless(n, network.per_node, network.device, 1, ())
        flight = predict(often, model, timeless, idle, *options).sent if free else 0.0
        steps = [predict(algorithm, model, network.of(n), each, *options).seconds for each in computes]
        fast = [predict(often, model, network.of(n), each, *options) for each in computes if free]
        return steps, [row.seconds * (flight / row.sent if flight else 1.0) for row in fast]

    def pace(counts: Sequence[int]) -> Pace:
        steps, least = rows(sum(counts))
        there = [k for k, n in enumerate(counts) if n]
        fastest, slowest = (choice(there, key=steps.__getitem__) for choice in (min, max))
        if not free:
            return Pace([steps[slowest]] * len(kinds), [float(H)] * len(kinds), H * steps[slowest])
        speeds = [steps[fastest] / step if isinstance(rule.every, BySpeed) else 1.0 for step in steps]
        ready = [max(1, int(H * v)) * step for v, step in zip(speeds, steps, strict=True)]  # seconds until a rank is
        order = sorted(there, key=ready.__getitem__)
        enough = min(rule.quorum or sum(counts), sum(counts))
        come = accumulate(counts[k] for k in order)
        begin = next(ready[k] for k, n in zip(order, come, strict=True) if n >= enough)
        begin = min(begin, inf if rule.grace is None else ready[order[0]] + rule.grace)
        round = max(begin, least[slowest])
        lengths = [ceil(t / round - NEARLY) * round / step for t, step in zip(ready, steps, strict=True)]
        return Pace(steps, lengths, round)

    return pace


class Group:
    """The ranks, and what they have done until `now`. Lists are by kind of machine, but for `kind` and `came`."""

    def __init__(self, kinds: Sequence[Machine], pace_of: Callable[[Sequence[int]], Pace], delay: int) -> None:
        self.kinds, self.delay = kinds, delay  # steps from the last launch to its landing
        self.pace_of = pace_of  # by the counts of all kinds
        self.now = self.ready = self.rounds = 0.0  # `ready`: when regrouping ends
        self.kept = self.held = 0.0  # tokens of machines that were lost since; seconds of presence of all machines
        self.steps = [0.0] * len(kinds)  # of a machine that was always there
        self.kind = [k for k, each in enumerate(kinds) for _ in range(each.count)]  # of each machine
        self.came: list[float | None] = [0.0] * len(self.kind)  # `steps` as each machine joined; None: it is away
        self.present, self.begun = [each.count for each in kinds], [0.0] * len(kinds)  # counts, and sums of `came`

    @property
    def pace(self) -> Pace:
        return self.pace_of(self.present)

    @property
    def tokens(self) -> float:
        of_kinds = zip(self.kinds, self.present, self.steps, self.begun, strict=True)
        return self.kept + sum(kind.tokens * (n * steps - begun) for kind, n, steps, begun in of_kinds)

    def go(self, until: float) -> None:
        """Let virtual time pass."""
        running, n = until - max(self.now, self.ready), sum(self.present)
        if running > 0 and n:
            pace = self.pace
            self.steps = [made + running / step for made, step in zip(self.steps, pace.steps, strict=True)]
            self.rounds += running / pace.round
        self.held += n * (until - self.now)
        self.now = until

    def join(self, i: int) -> None:
        """Let machine i in, from the beginning of the step under way: `lose` makes all repeat that step."""
        k = self.kind[i]
        self.came[i] = came = float(whole(self.steps[k]))
        self.present[k] += 1
        self.begun[k] += came

    def lose(self, i: int, came: float) -> None:
        """Drop machine i, and undo what is lost with it."""
        k, pace = self.kind[i], self.pace
        made, length = self.steps[k], pace.lengths[k]
        landed = whole((made - self.delay) / length) * length
        self.kept += self.kinds[k].tokens * max(0.0, landed - came)
        # Rounds may have been slower as this step began: then this takes away too many.
        self.rounds = max(0.0, self.rounds - (made - whole(made)) * pace.steps[k] / pace.round)
        self.steps = [float(whole(each)) for each in self.steps]
        self.came[i] = None
        self.present[k] -= 1
        self.begun[k] -= came

    def spell(self) -> Spell:
        """Return what the ranks that are present train from now on; all kinds have made as many steps."""
        ranks = tuple(i for i, came in enumerate(self.came) if came is not None)
        first, seconds = whole(self.steps[0]), self.pace.steps[0] if ranks else 0.0
        return Spell(first, max(self.now, self.ready) - (self.steps[0] - first) * seconds, seconds, ranks)


def whole(number: float) -> int:
    """Return the whole part of a number that rounding may have made a little too small."""
    return int(number + NEARLY)


def changes(group: Group, failures: Sequence[float], seconds: float, draw: random.Random) -> Iterator[Event]:
    """Let machines be lost and come back until `seconds` are over; yield after each change."""
    order, due = count(), [0.0] * len(group.kind)
    queue = [(at, next(order), -1) for at in failures]

    def plan(i: int, after: float | None) -> None:
        if after is not None:
            due[i] = group.now + after
            heappush(queue, (due[i], next(order), i))

    def life(i: int) -> float | None:
        mtbf = group.kinds[group.kind[i]].mtbf
        return mtbf and draw.expovariate(1 / mtbf)

    heapify(queue)
    for i in range(len(group.kind)):
        plan(i, life(i))
    while queue and queue[0][0] < seconds:
        at, _, i = heappop(queue)
        if i < 0:  # one of `failures`; perhaps nobody is left to be lost
            i = draw.choice([i for i, came in enumerate(group.came) if came is not None] or [-1])
        elif at != due[i]:  # it has been lost meanwhile
            continue
        if i < 0:
            continue
        group.go(at)
        kind, came = group.kinds[group.kind[i]], group.came[i]
        if came is None:
            group.join(i)
        else:
            group.lose(i, came)
        plan(i, life(i) if came is None else kind.away)
        yield Event(at, "back" if came is None else "lost", kind.name, sum(group.present), group.tokens)
    group.go(seconds)


@checked
def simulate(
    model: nn.Module,
    algorithm: Algorithm,
    machines: Sequence[Machine],
    network: Network,
    failures: Sequence[Seconds] = (),
    *,
    seconds: Rate = 86400.0,
    regroup: Seconds = 2.2,
    losses: Begin | None = None,
    seed: int = 0,
    bucket_bytes: Positive | None = None,
    flows: Positive = 1,
) -> Simulation:
    """Simulate training on machines of unequal speed that are lost and come back. Nothing is measured.

        machines = [Machine("4090", 0.11), Machine("3060", 0.3, count=2, mtbf=6 * 3600, away=600)]
        print(bk.tune.simulate(model, bk.algorithms.diloco(every=500), machines, network))

    Args:
        model: the model. Only the shapes of its trainable parameters are used.
        algorithm: as given to `bk.attach`, after its warm-up. It must fit every number of ranks that may be present.
        machines: all kinds of machines.
        network: measured by `probe` or made by `describe`. Its α and β are used for any number of ranks.
        failures: seconds at which a machine, drawn by the seed, is lost, besides the losses by `Machine.mtbf`.
        seconds: the virtual seconds.
        regroup: the seconds in which no rank trains after a change; on eight hosts, `bk.elastic` took 2.2
            (`python -m bench.elastic`).
        losses: a function of (rank, ranks) that returns a small model, its optimizer, and a function of the step that
            returns the loss of this rank's batch. The algorithm itself trains that model, in processes of this
            machine, one for each of up to 16 ranks; ranks are lost in the steps in which the simulation loses them.
        seed: draws lifetimes, and machines for `failures`.
        bucket_bytes, flows: as given to `bk.attach` and `bk.Comm`.

    Raises:
        ValueError: the algorithm does not fit a number of ranks, the network was not probed for it, it averages by node
            and machines are lost (which `bk.elastic` does not support), or its losses cannot be simulated.
    """
    kinds, rules = tuple(machines), lasting(algorithm.rules)
    if not kinds or not all(each.compute.seconds for each in kinds):
        raise ValueError(f"machines is a list of Machine, one or more, whose steps take time; not {kinds!r}")
    if not rules:
        raise ValueError(f"{algorithm!r} stops, and then nothing is exchanged; simulate a rule that lasts")
    if any(isinstance(rule.stage, Hierarchical) for rule in rules) and (failures or any(each.mtbf for each in kinds)):
        raise ValueError(f"{algorithm!r} averages by node, and bk.elastic cannot: no machine may be lost")
    pace_of = paces(algorithm, model, network, kinds, (bucket_bytes, flows))
    group = Group(kinds, pace_of, max(rule.delay for rule in rules))
    waits = any(rule.window != "free_running" for rule in rules)
    if losses is not None and not (waits and len(group.kind) <= MOST):
        raise ValueError(
            f"losses is for up to {MOST} ranks that wait; leave it out for {len(group.kind)} of {algorithm!r}"
        )
    spells, curve, events = [group.spell()], set[tuple[float, float]](), list[Event]()
    for event in changes(group, failures, seconds, random.Random(seed)):
        group.ready = event.seconds + regroup
        events.append(event)
        spells += [group.spell()] if losses else []
    if losses is not None:
        with Ranks(len(group.kind)) as live:
            curve.update(*live.run(trained, losses, algorithm, [*spells, group.spell()]))
    share, rounds = group.held / seconds / len(group.kind), whole(group.rounds)
    return Simulation(algorithm, kinds, seconds, group.tokens, rounds, share, tuple(events), tuple(sorted(curve)))
