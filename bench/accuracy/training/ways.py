"""Final losses of trainings whose gradients are sent in so many bits, on two ranks."""

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import baguakit as bk
from bench.network.table import RESULTS
from bench.network.table import Table as Results

from .tasks import Digits, Language, Table, Task, text

PATH = RESULTS / "accuracy-training.jsonl"
RANKS, SEEDS = 2, (1, 2)
BITS = (8, 6, 5, 4, 3, 2)
WITHOUT = (8, 4)  # of which trainings without error feedback are shown, too
TESTS = (0.9, 0.95, 1.0)  # of the steps: the mean of the losses then is that of the training

TASKS: dict[str, Task] = {
    "language": Language(steps=500, lr=3e-3, warmup=50),
    "digits": Digits(steps=300, lr=0.05),
    "embeddings": Table(steps=200, lr=0.2),
}


@dataclass(frozen=True)
class Way:
    """So many bits a value of gradients, 32 for those that are not compressed."""

    bits: int = 32
    rotate: bool = False
    feedback: bool = False

    def algorithm(self) -> bk.Rule:
        """Return the algorithm that sends them so."""
        if self.bits == 32:
            return bk.algorithms.gradient_allreduce()
        compressor = bk.compressors.Uniform(self.bits, rotate=self.rotate)
        return bk.algorithms.bytegrad(compressor, error_feedback=self.feedback)


def ways() -> Iterator[Way]:
    """Yield every way that is compared, the most telling first."""
    yield Way()
    for feedback, several in ((True, BITS), (False, WITHOUT)):
        for bits in several:
            for rotate in (True, False):
                yield Way(bits, rotate, feedback)


def trained(task: Task, way: Way, seed: int) -> dict[str, Any]:
    """Train on this rank; return the loss and the bytes a step. Collective."""
    comm = bk.Comm()
    training = task.begin(seed, comm.rank, comm.size)
    losses = []
    with bk.attach(training.model, training.optimizer, way.algorithm(), comm=comm) as att:
        for step in task.train(training):
            if step in [round(share * task.steps) for share in TESTS]:
                losses.append(training.test(comm))
        sent = att.report().bytes_per_step
    values = sum(p.numel() for p in training.model.parameters())
    return {"loss": statistics.mean(losses), "bytes": sent, "values": values}


def cell(name: str, way: Way, seed: int) -> dict[str, Any]:
    """Return the description of a training under which its result is kept."""
    task = TASKS[name]
    on = {"text": text(task.context)[2]} if isinstance(task, Language) else {}
    return {"task": name, **asdict(task), **asdict(way), "seed": seed, "ranks": RANKS} | on


def run() -> Results:
    """Train in every way that has no result yet, and keep each result as it comes."""
    table = Results(PATH)
    with bk.Ranks(RANKS) as ranks:
        for seed, (name, task), way in itertools.product(SEEDS, TASKS.items(), ways()):
            asked = cell(name, way, seed)
            if asked not in table:
                table.add(asked, ranks.run(trained, task, way, seed)[0])
                print(name, way, seed, table[asked], flush=True)
    return table
