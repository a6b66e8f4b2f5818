"""The program of a host, which measures steps on a network: `python -m bench.frontier.timing '[{…}, …]'`.

A step is timed from the end of the one before, over whole periods of the exchange, after the steps in which connections
are made and codecs are compiled. What the same ranks compute when nothing is exchanged is measured before.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

import baguakit as bk
from baguakit.compare.contenders import Contender
from baguakit.compare.table import Table
from baguakit.compare.training import optimizers_of, stepping, validated
from baguakit.compare.trials import Comparison, Job, best_rate
from bench.network.runs import Cell
from bench.network.train import blocks_of, counted, on_every_host, share

from .contenders import ALONE, contender
from .trajectories import AT_MORE, MADE, TASK

HOSTS, STEPS, WARM_UP = 4, 50, 4
LEAST_PERIODS = 2
SLOWNESS = 4  # how many times slower a straggler computes
FAR = "two cities, 100 Mb/s and 50 ms there and back"  # only some contenders are timed there: `SENT_FAR`
NETWORKS: dict[str, Cell] = {
    "100 Mb/s": {"rate": "100mbit"},
    "500 Mb/s": {"rate": "500mbit"},
    "1 Gb/s": {"rate": "1gbit"},
    "one link of 50 Mb/s among 500": {"rate": "500mbit", "slow_link": "50mbit"},
    "one straggler, 500 Mb/s": {"rate": "500mbit", "straggler": True},
    FAR: {"rate": "1gbit", "nodes": 2, "between": "100mbit", "delay": "25ms"},
}
MORE = ("100 Mb/s",)  # also with 8 hosts
FREE_AT_MORE = ("async_gossip",)  # of contenders whose ranks do not wait for each other
TRIED = "100 Mb/s"  # with four hosts: where learning rates are tried of those
SENT_FAR = (
    "DDP",
    "DDP, bf16 hook",
    "DDP, PowerSGD hook",
    "bytegrad",
    "bytegrad, 4 bits",
    "bytegrad, 2 bits",
    "local_sgd",
    "diloco",
    "diloco, 4 bits",
    "MuLoCo",
    "NoLoCo",
    "Streaming DiLoCo",
    "low_precision_decentralized",
    "async_model_average",
    "hivemind",
    "torchft, DiLoCo",
)
REAL = (  # trained on the network itself from beginning to end: (contender, network, steps or, of free ones, seconds)
    ("DDP", "1 Gb/s", 800),
    ("bytegrad", "100 Mb/s", 300),
    ("bytegrad, 4 bits", "500 Mb/s", 300),
    ("top_k, 2 bits", "100 Mb/s", 300),
    ("decentralized", "500 Mb/s", 300),
    ("diloco", "100 Mb/s", 300),
    ("SparseLoCo", "100 Mb/s", 300),
    ("DDP", FAR, 200),
    ("diloco, 4 bits", FAR, 800),
)
OPTIONS = {"steps", "lr", "seconds", "every_seconds", "loopback"}  # of a cell; the rest is what is measured, and where
FREE: Cell = {"seconds": 240.0, "every_seconds": 10.0}  # a training whose ranks do not wait for each other


def cells(some: Sequence[Contender], table: Table) -> list[Cell]:
    """Return what to measure of contenders that wait: steps on all networks, some of 8 hosts, and whole trainings.

    Args:
        some: the contenders.
        table: of the trainings on loopback, from which their learning rates are.
    """
    waiting = [each for each in some if not each.free]
    found = [timed(each, name) for name in NETWORKS for each in (ALONE, *on(name, waiting))]
    more = [each for each in waiting if each.name in AT_MORE]
    found += [timed(each, name, hosts=8) for name in MORE for each in (ALONE, *more)]
    for name, network, steps in REAL:
        for each in some:
            if each.name == name and (tried := MADE.tried_rates(table, each)):
                found.append(cell(each, network, steps=steps, lr=best_rate(tried)))
    return found


def free_cells(some: Sequence[Contender], timings: Table) -> list[Cell]:
    """Return what is to be measured next of contenders whose ranks do not wait for each other.

    Rates are tried on a network, as those of the others are on loopback; whole trainings take the best one so far.
    """
    found = list[Cell]()
    for each in some:
        if each.free and (lr := TRIALS.next_rate(timings, each)) is not None:
            found.append(TRIALS.cell(Job(each, 1, lr, TRIALS.tried)))
        elif each.free:
            found += [whole(each, name, HOSTS, timings) for name in NETWORKS if on(name, [each])]
            found += [whole(each, name, 8, timings) for name in MORE if each.name in FREE_AT_MORE]
    return found


def whole(each: Contender, network: str, hosts: int, timings: Table) -> Cell:
    """Return the cell of a training of ranks that do not wait for each other, at the best rate of their trials."""
    tried = TRIALS.tried_rates(timings, each)
    return cell(each, network, hosts, lr=best_rate(tried) if tried else MADE.lr, **FREE)


def on(network: str, some: Sequence[Contender]) -> list[Contender]:
    """Return those of some contenders that are timed on a network."""
    return [each for each in some if network != FAR or each.name in SENT_FAR]


def timed(each: Contender, network: str, hosts: int = HOSTS) -> Cell:
    """Return the cell of a contender's steps on a network."""
    return cell(each, network, hosts, steps=max(STEPS, LEAST_PERIODS * each.period))


def cell(each: Contender, network: str, hosts: int = HOSTS, **options: Any) -> Cell:
    """Return the description of a measurement."""
    expression = each.algorithm or each.peer
    return {"contender": each.name, "expression": expression, "hosts": hosts, **NETWORKS[network], **options}


def is_of(asked: Cell, each: Contender, network: str, hosts: int = HOSTS) -> bool:
    """Return whether a cell, of steps or of a whole training, is of a contender on a network."""
    return {name: value for name, value in asked.items() if name not in OPTIONS} == cell(each, network, hosts)


@dataclass(frozen=True)
class Trials(Comparison):
    """Trials of learning rates on a network."""

    def cell(self, job: Job) -> Cell:
        """Return the cell of a trial."""
        return cell(job.contender, TRIED, self.hosts, steps=job.steps, lr=job.lr)


TRIALS = Trials(MADE.contenders, TASK, hosts=HOSTS, trials=MADE.trials, tried=MADE.tried, lr=MADE.lr)


def measure(asked: Cell) -> dict[str, Any]:
    """Train a cell on all hosts; every rank returns the same result. Collective."""
    chosen, comm = contender(asked["contender"]), bk.Comm()
    compute, backward = alone(chosen, comm)
    nap = (SLOWNESS - 1) * backward if asked.get("straggler") and comm.rank == comm.size - 1 else 0.0
    lr = asked.get("lr", chosen.lr or MADE.lr)
    ends: list[float] = []
    losses: list[tuple[int, float, float]] = []
    whole = "lr" in asked  # a training from beginning to end

    with stepping(chosen, TASK, 1, lr, comm) as (take, training, _):
        first = 1 + (0 if whole else WARM_UP if chosen.period == 1 else chosen.period)
        for step in range(1, first):
            take(step)
        dist.barrier()
        before, spent, began = counted(), 0.0, time.perf_counter()
        for step in range(first, first + asked.get("steps", 10**9)):
            time.sleep(nap)
            take(step)
            ends.append(time.perf_counter() - began - spent)
            if whole and is_due(asked, step, ends):
                at = time.perf_counter()
                losses.append((step, ends[-1], next(iter(validated(training, comm).values()))))
                over = max(comm.gather_objects(ends[-1])) >= asked.get("seconds", math.inf)
                spent += time.perf_counter() - at
                if over:
                    break
        after = counted()
        dist.barrier()
    return summary(comm, chosen, ends, losses, (after - before).payload, compute)


def is_due(asked: Cell, step: int, ends: list[float]) -> bool:
    """Return whether the ranks validate after this step; time spent there is not counted.

    Ranks that do not wait for each other meet at a time; the others after a number of steps.
    """
    if "every_seconds" not in asked:
        return step % TASK.every == 0
    every, earlier = asked["every_seconds"], ends[-2] if len(ends) > 1 else 0.0
    return bool(ends[-1] // every > earlier // every)


def alone(chosen: Contender, comm: bk.Comm, steps: int = 8) -> tuple[float, float]:
    """Return seconds of a step, and of its forward and backward, with all ranks at work and nothing exchanged."""
    model, loss, _ = TASK.begin(1, comm.rank, comm.size)
    optimizers = optimizers_of(model, chosen.optimizer, chosen.lr or MADE.lr)
    dist.barrier()
    whole, part = [], []
    for step in range(1, steps + 1):
        began = time.perf_counter()
        model.zero_grad()
        loss(model, step).backward()
        part.append(time.perf_counter() - began)
        for optimizer in optimizers:
            optimizer.step()
        whole.append(time.perf_counter() - began)
    found = comm.gather_objects((statistics.median(whole[2:]), statistics.median(part[2:])))
    return statistics.median(f[0] for f in found), statistics.median(f[1] for f in found)


def summary(
    comm: bk.Comm, chosen: Contender, ends: list[float], losses: list[Any], payload: int, compute: float
) -> dict[str, Any]:
    """Return what all ranks measured. Collective."""
    every = comm.gather_objects((ends, payload / len(ends) / share(comm.size)))
    blocks = [blocks_of(each, chosen.period) for each, _ in every]
    found = {
        "step": statistics.median(blocks[0]),
        "steps": len(ends),
        "step_by_rank": [statistics.median(block) for block in blocks],
        "sent": statistics.mean(sent for _, sent in every),
        "compute": compute,
    }
    if len(blocks[0]) > 3:
        found["quartiles"] = statistics.quantiles(blocks[0], n=4, method="inclusive")
    return found | ({"losses": losses, "seconds": ends[-1]} if losses else {})


if __name__ == "__main__":
    on_every_host(measure)
