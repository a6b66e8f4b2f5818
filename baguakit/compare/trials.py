"""A comparison: the trainings and timings that it needs, and those that are still to be done.

Losses by step are recorded on loopback, where a synchronous training takes the same course as on every network.
Learning rates are tried equally: each contender has as many trials, each of twice or half of its best rate so far.
"""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from ..arguments import Positive, Range, check_fields
from ..comm import Comm
from ..ranks import RankError, Ranks
from .contenders import DDP, Contender
from .pacing import Pacer, bits_per_second
from .table import Table
from .training import Task, time_steps, train


class Job(NamedTuple):
    """A training of a contender or, if `timed`, some steps on the network."""

    contender: Contender
    seed: int
    lr: float
    steps: int
    timed: bool = False

    def __str__(self) -> str:
        return f"{self.contender.name}, lr {self.lr:g}, " + ("timing" if self.timed else f"{self.steps} steps")


@dataclass(frozen=True)
class Comparison:
    """The contenders, and how they are compared."""

    contenders: tuple[Contender, ...]  # among them DDP, whose losses are the targets
    task: Task
    hosts: Annotated[int, Range(2)] = 4  # the number of ranks
    rate: str = "100mbit"  # at which each may send
    seeds: Positive = 1  # of whole trainings: 1, 2, …
    steps: Annotated[int, Range(4)] = 180  # of DDP's whole trainings
    longest: Annotated[int, Range(4)] = 270  # of the others', so that they reach its last loss later
    trials: Positive = 3  # of learning rates for each contender, with the first seed
    tried: Positive = 60  # the steps of a trial
    lr: float = 5e-4  # the learning rate of the first trial of a contender that has none of its own
    timed: Positive = 20  # steps that are timed, and at least two periods of the exchange

    def __post_init__(self) -> None:
        check_fields(self)
        bits_per_second(self.rate)

    def cell(self, job: Job) -> dict[str, Any]:
        """Return the key of a job's result. Only timings and free-running trainings depend on the rate."""
        one = job.contender
        who = {"contender": one.name, "expression": one.algorithm or one.peer, "optimizer": one.optimizer}
        what = {"ranks": self.hosts, "seed": job.seed, "lr": job.lr, "steps": job.steps}
        rate = {"rate": self.rate} if job.timed or one.free else {}
        return who | what | self.task.facts() | ({"module": one.source} if one.source else {}) | rate

    def timing(self, chosen: Contender) -> Job:
        return Job(chosen, 1, chosen.lr or self.lr, max(self.timed, 2 * chosen.period), timed=True)

    def tried_rates(self, table: Table, chosen: Contender) -> dict[float, float]:
        """Return the last losses of a contender's trials by their learning rates."""
        ladder = [(chosen.lr or self.lr) * 2.0**k for k in range(-self.trials, self.trials + 1)]
        known = {lr: self.cell(Job(chosen, 1, lr, self.tried)) for lr in ladder}
        return {lr: final(table[cell]) for lr, cell in known.items() if cell in table}

    def next_rate(self, table: Table, chosen: Contender) -> float | None:
        """Return the learning rate of the next trial: twice the best one so far, or half of it; None at the end."""
        tried = self.tried_rates(table, chosen)
        best = best_rate(tried) if tried else chosen.lr or self.lr
        due = [lr for lr in ((2 * best, best / 2) if tried else (best,)) if lr not in tried]
        return due[0] if due and len(tried) < self.trials else None

    def whole(self, table: Table, chosen: Contender) -> list[Job]:
        """Return the whole trainings of a contender, at the learning rate that its trials have chosen so far."""
        tried, steps = self.tried_rates(table, chosen), self.steps if chosen == DDP else self.longest
        return [Job(chosen, 1 + i, best_rate(tried), steps) for i in range(self.seeds)] if tried else []

    def jobs(self, table: Table, failed: Mapping[str, str]) -> Iterator[Job]:
        """Yield what is to be done: all of a contender before the next one, and after all of them further seeds.

        What comes next depends on the results in the table, and on which contenders have failed.
        """
        for each in self.contenders:
            while each.name not in failed and (lr := self.next_rate(table, each)) is not None:
                yield Job(each, 1, lr, self.tried)
            if each.name not in failed:
                yield from (*self.whole(table, each)[:1], *([] if each.free else [self.timing(each)]))
        for i in range(1, self.seeds):
            yield from (self.whole(table, each)[i] for each in self.contenders if each.name not in failed)

    def lacking(self, table: Table, chosen: Contender) -> dict[str, int]:
        """Return {"trials", "trainings" or "timing": the number of their steps that are still to be done}."""
        done, timing = sum(self.cell(job) in table for job in self.whole(table, chosen)), self.timing(chosen)
        steps = {
            "trials": (self.trials - len(self.tried_rates(table, chosen))) * self.tried,
            "trainings": (self.seeds - done) * (self.steps if chosen == DDP else self.longest),
            "timing": 0 if chosen.free or self.cell(timing) in table else timing.steps,
        }
        return {name: left for name, left in steps.items() if left}


def final(result: Mapping[str, Any]) -> float:
    """Return the last loss; infinity of a training that diverged."""
    return math.inf if "diverged" in result else float(result["losses"][-1][-1])


def best_rate(tried: Mapping[float, float]) -> float:
    return min(tried, key=lambda lr: tried[lr])


def run(
    made: Comparison, jobs: Iterable[Job], table: Table, failed: dict[str, str], end: float, show: Callable[[Job], None]
) -> None:
    """Do those of the jobs of which the table has no result, and add each result. `show` is called before each job.

    If a contender raises, its error is added to `failed` under its name, and its other jobs are left out. A job that
    would last beyond `end` (of `time.monotonic`), if as fast as the training before, is not begun, nor are later ones.
    """
    pace = 0.0
    with Ranks(made.hosts) as ranks:
        for job in jobs:
            if (cell := made.cell(job)) in table or job.contender.name in failed:
                continue
            began = time.monotonic()
            if began + pace * job.steps > end:
                return
            show(job)
            try:
                table.add(cell, ranks.run(do, made, job, limit=None if end == math.inf else end - began)[0])
            except RankError as error:
                if time.monotonic() >= end:
                    return
                failed[job.contender.name] = str(error).strip().splitlines()[-1]
                table.fail(cell, failed[job.contender.name])
            pace = pace if job.timed else (time.monotonic() - began) / job.steps


def do(made: Comparison, job: Job) -> Mapping[str, Any]:
    """Do a job on this rank. Collective."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a job that ends with the time prints no stacks
    comm, rate = Comm(), bits_per_second(made.rate) / 8
    if job.timed:
        return time_steps(job.contender, made.task, job.lr, job.steps, rate, comm)
    with Pacer(rate) if job.contender.free else contextlib.nullcontext():
        return train(job.contender, made.task, job.seed, job.lr, job.steps, comm)
