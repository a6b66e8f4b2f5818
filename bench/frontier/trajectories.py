"""Trainings on loopback, whose losses by step do not depend on the network: a result for each, kept as it comes."""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from baguakit.compare import language, trials
from baguakit.compare.contenders import Contender
from baguakit.compare.table import Table
from baguakit.compare.training import Task
from baguakit.compare.trials import Comparison, Job, final
from bench.network.table import RESULTS

from .contenders import CONTENDERS

PATH = RESULTS / "frontier-losses.jsonl"
MORE = 8  # ranks
SEEDS = (1, 2, 3)
LEADING = 10  # contenders with all seeds
AT_MORE = ("DDP", "bytegrad", "bytegrad, 4 bits", "diloco, 4 bits", "MuLoCo")  # contenders with MORE ranks
UNTRAINED = ("hivemind",)  # its weights are those of local_sgd: it is timed only


@dataclass(frozen=True)
class Frontier(Task):
    """The small GPT of `baguakit compare`, under the names that results have it by."""

    def facts(self) -> dict[str, Any]:
        """Return what a result depends on: the values of the model and its training, and the digest of the text."""
        pace = {name: value for name, value in asdict(self).items() if name != "place"}
        sizes = {"context": language.CONTEXT, "batch": language.BATCH, "windows": language.HELD_OUT}
        return {"layers": 4, "width": 256, "heads": 4, **sizes, **pace, "text": language.text(language.CONTEXT)[2]}


TASK = Frontier()
TRAINED = tuple(each for each in CONTENDERS if not each.free and each.peer not in UNTRAINED)
MADE = Comparison(TRAINED, TASK, seeds=len(SEEDS), steps=800, longest=1200, trials=4, tried=300, timed=50)


def with_ranks(ranks: int) -> Comparison:
    """Return the comparison with so many ranks; learning rates are those of four."""
    return replace(MADE, hosts=ranks)


def due(made: Comparison, table: Table, failed: Mapping[str, str]) -> Iterator[Job]:
    """Yield the trainings on four ranks: trials and the first seed of all, then further seeds of those that lead."""
    yield from (job for job in replace(made, seeds=1).jobs(table, failed) if not job.timed)
    able = [each for each in made.contenders if each.name not in failed]
    for i in range(1, made.seeds):
        yield from (made.whole(table, each)[i] for each in leaders(table, able)[:LEADING])


def leaders(table: Table, some: Sequence[Contender]) -> list[Contender]:
    """Return contenders in the order of the loss that they end with; DDP, whose losses are the targets, first."""

    def loss(each: Contender) -> float:
        cells = [MADE.cell(job) for job in MADE.whole(table, each)[:1]]
        return final(table[cells[0]]) if cells and cells[0] in table else math.inf

    return sorted(some, key=lambda each: (each.name != "DDP", loss(each)))


def run(some: Sequence[Contender], minutes: float = math.inf) -> int:
    """Train what has no result yet, begin nothing after so many minutes; return how many contenders failed."""
    table, end, failed = Table(PATH), time.monotonic() + 60 * minutes, dict[str, str]()
    made = replace(MADE, contenders=tuple(each for each in TRAINED if each in some))

    def show(job: Job) -> None:
        print(f"{job}, {job.steps} steps", flush=True)

    trials.run(made, due(made, table, failed), table, failed, end, show)
    with_more = [each for each in leaders(table, made.contenders) if each.name in AT_MORE]
    jobs = (job for each in with_more for job in MADE.whole(table, each)[:1])
    trials.run(with_ranks(MORE), jobs, table, failed, end, show)
    for name, error in failed.items():
        print(f"{name} failed: {error}", file=sys.stderr, flush=True)
    return len(failed)
