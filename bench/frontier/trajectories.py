"""Trainings on loopback, whose losses by step do not depend on the network: a result for each, kept as it comes."""

import copy
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import baguakit as bk
from bench.network.table import RESULTS, Table

from .contenders import DDP, Contender
from .task import TASK, Task

PATH = RESULTS / "frontier-losses.jsonl"
RANKS, MORE = 4, 8
STEPS = 800  # of DDP; its loss then is its final one
LONGEST = 1200  # of the others, so that they reach that loss later, if they do
TRIED, TRIALS = 300, 4  # steps of a trial, and trials of learning rates for each contender, with the first seed
SEEDS = (1, 2, 3)
LEADING = 10  # contenders with all seeds
AT_MORE = ("DDP", "bytegrad", "bytegrad, 4 bits", "diloco, 4 bits", "MuLoCo")  # contenders with MORE ranks
UNTRAINED = ("hivemind",)  # its weights are those of local_sgd: it is timed only
Cell = dict[str, Any]


def cell(contender: Contender, ranks: int, seed: int, lr: float, steps: int, task: Task = TASK) -> Cell:
    """Return the description of a training under which its result is kept."""
    return {
        "contender": contender.name,
        "expression": contender.algorithm or contender.peer,
        "optimizer": contender.optimizer,
        "ranks": ranks,
        "seed": seed,
        "lr": lr,
        "steps": steps,
        **task.described(),
    }


def trained(chosen: Contender, seed: int, lr: float, steps: int, task: Task) -> dict[str, Any]:
    """Train on this rank; return (step, bits per byte) of each validation and the bytes of a step. Collective.

    A training ends when its loss is not finite, or as high as that of a model that knows nothing.
    """
    comm = bk.Comm()
    model = task.begin(seed)
    optimizers = task.optimizers(model, chosen.optimizer, lr)
    losses: list[tuple[int, float]] = []
    began = time.perf_counter()
    with chosen.train(model, optimizers, comm) as (called, attachment):
        for step in range(1, steps + 1):
            set_rate(optimizers, task.rate(lr, step))
            model.zero_grad()
            task.loss(called, seed, step, comm.rank).backward()
            for optimizer in optimizers:
                optimizer.step()
            if step % task.every == 0 or step == steps:
                loss = validated(model, task, comm)
                if not loss < 9.0:  # eight bits say nothing of a byte
                    return {"losses": losses, "diverged": step, "seconds": time.perf_counter() - began}
                losses.append((step, loss))
        sent = attachment.report().bytes_per_step if attachment is not None else None
    return {"losses": losses, "bytes": sent, "seconds": time.perf_counter() - began}


def set_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    """Set the learning rate of all optimizers."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr


def validated(model: torch.nn.Module, task: Task, comm: bk.Comm) -> float:
    """Return the loss of the mean of all ranks' weights, which stay as they are. Collective."""
    mean = copy.deepcopy(model)
    bk.primitives.mean_([p.data for p in mean.parameters()], comm)
    return task.validate(mean, comm)


def final(result: Mapping[str, Any]) -> float:
    """Return the last loss; infinity of a training that diverged."""
    return math.inf if "diverged" in result else float(result["losses"][-1][1])


def rates(table: Table, chosen: Contender, ranks: int = RANKS) -> dict[float, float]:
    """Return the losses of a contender's trials by their learning rates."""
    known = {lr: cell(chosen, ranks, SEEDS[0], lr, TRIED) for lr in ladder(chosen)}
    return {lr: final(table[asked]) for lr, asked in known.items() if asked in table}


def ladder(chosen: Contender) -> list[float]:
    """Return the learning rates that trials may reach, each twice the one before."""
    return [chosen.lr * 2.0**k for k in range(-TRIALS, TRIALS + 1)]


def next_rate(chosen: Contender, tried: Mapping[float, float]) -> float | None:
    """Return the learning rate of the next trial: twice the best one so far, or half of it; None at the end."""
    if not tried:
        return chosen.lr
    best = min(tried, key=lambda lr: tried[lr])
    due = [lr for lr in (2 * best, best / 2) if lr not in tried]
    return due[0] if due and len(tried) < TRIALS else None


def best_rate(tried: Mapping[float, float]) -> float:
    """Return the learning rate of the lowest loss."""
    return min(tried, key=lambda lr: tried[lr])


def due(table: Table, some: list[Contender], failed: set[str]) -> Iterator[tuple[Contender, int, int, float, int]]:
    """Yield (contender, ranks, seed, learning rate, steps) of each training, those that answer most first.

    The table is read anew for each, as what comes next depends on the results; so are the names of those that failed.
    """
    for each in some:
        while each.name not in failed and (lr := next_rate(each, rates(table, each))) is not None:
            yield each, RANKS, SEEDS[0], lr, TRIED
        if each.name not in failed:
            yield each, RANKS, SEEDS[0], best_rate(rates(table, each)), longest(each)
    ordered = leaders(table, [each for each in some if each.name not in failed])
    for seed in SEEDS[1:]:
        for each in ordered[:LEADING]:
            yield each, RANKS, seed, best_rate(rates(table, each)), longest(each)
    for each in (each for each in ordered if each.name in AT_MORE):
        yield each, MORE, SEEDS[0], best_rate(rates(table, each)), longest(each)


def longest(each: Contender) -> int:
    """Return the steps of a whole training."""
    return STEPS if each == DDP else LONGEST


def leaders(table: Table, some: list[Contender]) -> list[Contender]:
    """Return contenders in the order of the loss that they end with; DDP, whose losses are the targets, first."""

    def loss(each: Contender) -> float:
        asked = cell(each, RANKS, SEEDS[0], best_rate(rates(table, each)), longest(each))
        return final(table[asked]) if asked in table else math.inf

    return sorted(some, key=lambda each: (each != DDP, loss(each)))


def run(some: Sequence[Contender], minutes: float = math.inf) -> int:
    """Train what has no result yet, begin nothing after so many minutes; return how many contenders failed."""
    table, end, ranks = Table(PATH), time.monotonic() + 60 * minutes, dict[int, bk.Ranks]()
    waiting, failed = [each for each in some if not each.free and each.peer not in UNTRAINED], set[str]()
    try:
        for chosen, size, seed, lr, steps in due(table, waiting, failed):
            asked = cell(chosen, size, seed, lr, steps)
            if asked in table or chosen.name in failed:
                continue
            if time.monotonic() > end:
                break
            if size not in ranks:
                ranks[size] = bk.Ranks(size)
            try:
                table.add(asked, ranks[size].run(trained, chosen, seed, lr, steps, TASK)[0])
            except bk.RankError as error:
                failed.add(chosen.name)
                table.fail(asked, str(error).strip().splitlines()[-1])
                print(f"{chosen.name} failed: {error}", file=sys.stderr, flush=True)
            else:
                words = f"{chosen.name}, {size} ranks, seed {seed}, lr {lr:g}, {steps} steps"
                print(f"{words}: {final(table[asked]):.4f}, {table[asked]['seconds']:.0f} s", flush=True)
    finally:
        for each in ranks.values():
            each.close()
    return len(failed)
