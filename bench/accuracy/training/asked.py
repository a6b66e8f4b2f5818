"""Trainings in which an error is asked for, `Adaptive`, beside what formats of fixed bits would have done to them."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import baguakit as bk
from baguakit.stages.adaptive import format_of
from bench.network.table import RESULTS
from bench.network.table import Table as Results

from .tasks import Language, Task, text
from .ways import RANKS, TASKS

PATH = RESULTS / "accuracy-asked.jsonl"
ERRORS, SEED, BUCKET = (1e-3, 5e-3, 2e-2), 1, 1 << 18
OVER = 1.1  # of the error that was asked: more is counted


@dataclass(frozen=True, repr=False)
class Watched(bk.stages.Adaptive):
    """`Adaptive`, which notes what each of its formats would do to a bucket before it sends it in one of them."""

    def __call__(self, x: Tensor, state: Any, comm: bk.Comm, residual: Tensor | None = None) -> Tensor:
        size, lost = float(x.double().square().sum()), torch.empty_like(x, dtype=torch.float32)
        errors = {}
        for bits in self.bits:
            format_of(bits).compress(x.view(1, -1), lost.view(1, -1))
            errors[bits] = float(lost.double().square().sum()) / size if size else 0.0
        y = super().__call__(x, state, comm, residual)
        _flights.append(Flight(x.data_ptr(), x.numel(), size**0.5, int(state["bits"]), errors))
        return y


@dataclass(frozen=True)
class Flight:
    """One flight of a bucket: its place and values, the norm of this rank's values, the bits, and each one's error."""

    bucket: int
    values: int
    norm: float
    bits: int
    errors: Mapping[int, float]


_flights: list[Flight] = []


def trained(task: Task, error: float, seed: int) -> dict[str, Any]:
    """Train on this rank; return what all ranks found. Collective."""
    comm = bk.Comm()
    training = task.begin(seed, comm.rank, comm.size)
    _flights.clear()
    stage = Watched(error)
    with bk.attach(training.model, training.optimizer, bk.during_backward(stage), comm=comm, bucket_bytes=BUCKET):
        for _ in task.train(training):
            pass
        final = training.test(comm)
    weights = torch.cat([p.detach().flatten() for p in training.model.parameters()])
    return {"loss": final, "equal": same(weights, comm)} | summary(_flights, stage, comm) | {"steps": task.steps}


def same(weights: Tensor, comm: bk.Comm) -> bool:
    """Return whether all ranks have the same bits. Collective."""
    first, *others = comm.gather_objects(weights)
    return all(torch.equal(first.view(torch.int32), each.view(torch.int32)) for each in others)


def summary(flights: list[Flight], stage: bk.stages.Adaptive, comm: bk.Comm) -> dict[str, Any]:
    """Return the errors and bytes of all flights of all ranks, and those of each format, had it been fixed."""
    norms: dict[int, list[float]] = {}
    for flight in flights:
        norms.setdefault(flight.bucket, []).append(flight.norm)
    mine = {
        "adaptive": [flight.errors[flight.bits] for flight in flights],
        "range": max(max(each) / min(norm for norm in each if norm) for each in norms.values()),
    }
    every = comm.gather_objects((mine, {b: max(f.errors[b] for f in flights) for b in stage.bits}))
    errors = torch.tensor([error for each, _ in every for error in each["adaptive"]], dtype=torch.float64)

    def sent(bits: int, flight: Flight) -> float:
        return 2 * (comm.size - 1) * format_of(bits).row_bytes(flight.values // comm.size)

    return {
        "worst": float(errors.max()),
        "over": float((errors > OVER * stage.error).double().mean()),
        "median": float(errors.median()),
        "bytes": sum(sent(flight.bits, flight) for flight in flights),
        "bits": {b: sum(f.bits == b for f in flights) / len(flights) for b in stage.bits},
        "range": max(each["range"] for each, _ in every),
        "fixed": {
            b: {"worst": max(worst[b] for _, worst in every), "bytes": sum(sent(b, f) for f in flights)}
            for b in stage.bits
        },
    }


def cells() -> Iterator[tuple[dict[str, Any], Task, float]]:
    """Yield the description of every training, its task and the error."""
    for error, (name, task) in itertools.product(ERRORS, TASKS.items()):
        on = {"text": text(task.context)[2]} if isinstance(task, Language) else {}
        about = {"error": error, "seed": SEED, "ranks": RANKS, "bucket_bytes": BUCKET}
        yield {"task": name, **asdict(task), **about, **on}, task, error


def run() -> Results:
    """Train where there is no result yet, and keep each result as it comes."""
    table = Results(PATH)
    with bk.Ranks(RANKS) as ranks:
        for cell, task, error in cells():
            if cell not in table:
                table.add(cell, ranks.run(trained, task, error, SEED)[0])
                print(cell["task"], error, table[cell], flush=True)
    return table
