"""Seconds and bytes to a loss: composed from losses by step, on loopback, and seconds by step, on a network."""

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.network.table import Table

from .contenders import ALONE, CONTENDERS, DDP, Contender
from .timing import HOSTS, NETWORKS, is_of, timed
from .trajectories import RANKS, SEEDS, STEPS, best_rate, longest, rates
from .trajectories import cell as training

Curve = list[tuple[float, float]]  # (steps, or seconds, or bytes; bits per byte)
SHARES = (0.25, 0.5, 1.0)  # of DDP's steps: its losses there are the targets


@dataclass(frozen=True)
class Row:
    """A contender on a network.

    Attributes:
        step, sent: seconds and bytes of a rank in a step.
        lr: the learning rate that its trials chose.
        curves: losses by step, of each seed.
        real: losses by second of a training on this network, where there is one; of free ranks there is nothing else.
    """

    contender: Contender
    step: float
    sent: float
    lr: float
    curves: list[Curve] = field(default_factory=list)
    real: Curve = field(default_factory=list)

    def curve(self) -> Curve:
        """Return the mean loss over seeds by step, or, of free ranks, the loss by second."""
        return self.real if self.contender.free else mean_of(self.curves)

    def seconds(self, target: float) -> float:
        """Return the seconds to a loss; infinity if it was never reached."""
        return self.step * self.steps(target)

    def half_range(self, target: float) -> float:
        """Return half the range over seeds of the seconds to a loss; infinity if one of them did not reach it."""
        steps = [reached(curve, target) for curve in self.curves]
        return self.step * (max(steps) - min(steps)) / 2 if all(map(math.isfinite, steps)) else math.inf

    def bytes(self, target: float) -> float:
        """Return the bytes that a rank sends to a loss."""
        return self.sent * self.steps(target)

    def steps(self, target: float) -> float:
        """Return the steps to a loss."""
        found = reached(self.curve(), target)
        return found / self.step if self.contender.free else found

    def final(self) -> float:
        """Return the loss after as many steps as DDP takes; of free ranks, that after all of theirs."""
        return self.real[-1][1] if self.contender.free else at(self.curve(), STEPS)


def mean_of(curves: Sequence[Curve]) -> Curve:
    """Return the mean of curves where all of them have a point, which is to the end of the shortest."""
    return [
        (step, statistics.mean(at(curve, step) for curve in curves)) for step, _ in min(curves, key=len, default=[])
    ]


def reached(curve: Curve, target: float) -> float:
    """Return where a curve, drawn as straight lines from point to point, first is as low as the target."""
    for (x, y), (later, lower) in itertools.pairwise(curve):
        if y <= target:
            return x
        if lower <= target:
            return x + (later - x) * (y - target) / (y - lower)
    return math.inf


def at(curve: Curve, x: float) -> float:
    """Return the loss at a step of the curve; infinity if the training ended before."""
    return next((loss for step, loss in curve if step == x), math.inf)


def curves(losses: Table, chosen: Contender, ranks: int = RANKS) -> list[Curve]:
    """Return the losses by step of each whole training of a contender, at the learning rate that its trials chose."""
    tried = rates(losses, chosen)
    if not tried:
        return []
    asked = [training(chosen, ranks, seed, best_rate(tried), longest(chosen)) for seed in SEEDS]
    return [[(step, loss) for step, loss in losses[each]["losses"]] for each in asked if each in losses]


def rows(losses: Table, timings: Table, network: str, hosts: int = HOSTS) -> list[Row]:
    """Return what is known of all contenders on a network, in the order of the list."""
    found = []
    for each in CONTENDERS:
        if each.free:
            whole = [result for asked, result in timings if is_of(asked, each, network, hosts)]
            found += [Row(each, result["step"], result["sent"], each.lr, [], by_second(result)) for result in whole[:1]]
            continue
        asked = timed(each, network, hosts)
        source = LIKE.get(each.peer, each)
        known = curves(losses, source, hosts)
        if asked in timings and known:
            result = timings[asked]
            lr = best_rate(rates(losses, source))
            found.append(Row(each, result["step"], result["sent"], lr, known))
    return found


# A synchronous peer whose weights are, to rounding, those of an algorithm here: it is timed, and not trained again.
LIKE = {"hivemind": next(each for each in CONTENDERS if each.name == "local_sgd")}


def by_second(result: Mapping[str, Any]) -> Curve:
    """Return losses by second of a training on a network."""
    return [(seconds, loss) for _, seconds, loss in result["losses"]]


def targets(losses: Table, ranks: int = RANKS) -> list[float]:
    """Return DDP's losses at some of its steps, the mean over its seeds."""
    known = mean_of(curves(losses, DDP, ranks))
    return [at(known, round(share * STEPS)) for share in SHARES] if known else []


def steps_beside_ddp(losses: Table) -> dict[str, float]:
    """Return steps to DDP's last loss as a multiple of DDP's, by the expression of each algorithm that reached it.

    One seed tells too little: contenders without all seeds are left out.
    """
    goals, found = targets(losses), {}
    for each in CONTENDERS if len(curves(losses, DDP)) == len(SEEDS) else ():
        known = curves(losses, each) if each.algorithm and not each.free else []
        steps = reached(mean_of(known), goals[-1])
        if len(known) == len(SEEDS) and math.isfinite(steps):
            found[", ".join(map(repr, each.rules()))] = round(steps / STEPS, 3)
    return found


@dataclass(frozen=True)
class Place:
    """A network by DDP's step on it.

    Attributes:
        r: computation to DDP's communication of a step.
        ceiling: DDP's step to computation alone: no exchange can be more times as fast.
    """

    r: float
    ceiling: float


def place(timings: Table, network: str, hosts: int = HOSTS) -> Place | None:
    """Return what a network is to DDP; None if that has not been measured."""
    both = [timed(each, network, hosts) for each in (DDP, ALONE)]
    if not all(asked in timings for asked in both):
        return None
    ddp, alone = (timings[asked]["step"] for asked in both)
    return Place(alone / (ddp - alone), ddp / alone)


def checks(losses: Table, timings: Table) -> list[tuple[str, str, int, float, float]]:
    """Return (contender, network, steps, measured seconds, composed seconds) of trainings on a network itself."""
    found = []
    for each, network in itertools.product(CONTENDERS, NETWORKS):
        for asked, result in timings:
            if "lr" in asked and not each.free and is_of(asked, each, network, asked["hosts"]):
                step = timings[timed(each, network, asked["hosts"])]["step"]
                found.append((each.name, network, result["steps"], result["seconds"], step * result["steps"]))
    return found


def best(found: Sequence[Row], cost: Callable[[Row], float]) -> list[Row]:
    """Return ours whose cost is finite, the least first."""
    costs = [(cost(row), row) for row in found if not row.contender.peer]
    return [row for least, row in sorted(costs, key=lambda pair: pair[0]) if math.isfinite(least)]
