"""Seconds and bytes to a loss on each network: rows of the losses on loopback and of the steps on networks."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baguakit.compare import compose
from baguakit.compare.compose import Curve, Row, mean_of, reached
from baguakit.compare.contenders import DDP, Contender
from baguakit.compare.names import algorithm
from baguakit.compare.table import Table
from baguakit.compare.trials import best_rate

from .contenders import ALONE, CONTENDERS, MUON
from .timing import HOSTS, NETWORKS, is_of, timed, whole
from .trajectories import MADE, SEEDS, with_ranks

# A synchronous peer whose weights are, to rounding, those of an algorithm here: it is timed, and not trained again.
LIKE = {"hivemind": next(each for each in CONTENDERS if each.name == "local_sgd")}


def curves(losses: Table, chosen: Contender, ranks: int = HOSTS) -> list[Curve]:
    """Return the losses by step of a contender's whole trainings, at the learning rate of its trials on four ranks."""
    cells = [with_ranks(ranks).cell(job) for job in MADE.whole(losses, chosen)]
    return [[(step, loss) for step, loss in losses[cell]["losses"]] for cell in cells if cell in losses]


def rows(losses: Table, timings: Table, network: str, hosts: int = HOSTS) -> list[Row]:
    """Return what is known of all contenders on a network, in the order of the list."""
    found = []
    for each in CONTENDERS:
        if each.free:
            asked = whole(each, network, hosts, timings)
            if asked in timings:
                result = timings[asked]
                curve = [(seconds / result["step"], loss) for _, seconds, loss in result["losses"]]
                found.append(Row(each, result["step"], result["sent"], asked["lr"], [curve]))
            continue
        asked, source = timed(each, network, hosts), LIKE.get(each.peer, each)
        known = curves(losses, source, hosts)
        if asked in timings and known:
            lr = best_rate(MADE.tried_rates(losses, source))
            found.append(Row(each, timings[asked]["step"], timings[asked]["sent"], lr, known))
    return found


def targets(losses: Table, ranks: int = HOSTS) -> list[float]:
    """Return DDP's losses at some of its steps, the mean over its seeds."""
    known = mean_of(curves(losses, DDP, ranks))
    return [compose.at(known, round(share * MADE.steps)) for share in compose.SHARES] if known else []


def steps_beside_ddp(losses: Table) -> dict[str, float]:
    """Return steps to DDP's last loss as a multiple of DDP's, by the expression of each algorithm that reached it.

    One seed tells too little: contenders without all seeds are left out. So are those with Muon: their steps show
    the optimizer, and not the algorithm. An average in fp32 takes DDP's steps.
    """
    goals, found = targets(losses), {"during_backward(Mean())": 1.0}
    for each in CONTENDERS if len(curves(losses, DDP)) == len(SEEDS) else ():
        known = curves(losses, each) if each.algorithm and not each.free and each.optimizer != MUON else []
        steps = reached(mean_of(known), goals[-1])
        if len(known) == len(SEEDS) and math.isfinite(steps):
            found[" + ".join(map(repr, algorithm(each.algorithm).rules))] = round(steps / MADE.steps, 3)
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


def checks(timings: Table) -> list[tuple[str, str, int, float, float]]:
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
