"""A training with a contender on a rank: its losses by step, and seconds and bytes of a step."""

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..attach import Attachment
from ..comm import Comm
from ..primitives import mean_
from . import pacing
from .contenders import Contender
from .tasks import Task, Training, optimizers_of

WARM_UP = 4  # steps in which connections are made and kernels compiled


@contextlib.contextmanager
def stepping(
    chosen: Contender, task: Task, seed: int, lr: float, comm: Comm
) -> Iterator[tuple[Callable[[int], None], Training, Attachment | None]]:
    """Yield a function that trains for a step, which takes its number, 1 or more; the training; and any attachment."""
    training = task.begin(seed, comm.rank, comm.size)
    optimizers = optimizers_of(training.model, chosen.optimizer, lr)

    def step(number: int) -> None:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = lr * min(1.0, number / task.warmup)
        training.model.zero_grad()
        training.loss(model, number).backward()
        for optimizer in optimizers:
            optimizer.step()

    with chosen.train(training.model, optimizers, comm) as (model, attachment):
        yield step, training, attachment


def train(chosen: Contender, task: Task, seed: int, lr: float, steps: int, comm: Comm) -> dict[str, Any]:
    """Train, and validate the mean of all ranks' weights now and then, until a loss is not finite. Collective.

    Returns:
        "losses": (step, loss) of each validation.
        "diverged": the step in which training ended early, without which there are also:
        "scores": all numbers of the last validation; "alone": those of the ranks' own weights, the mean over ranks.
        "step": seconds of a step on the slowest rank, the mean; "bytes": sent in it, None without an attachment;
        "seconds": of all, with validations.
    """
    losses = list[tuple[int, float]]()
    spent, began = 0.0, time.perf_counter()
    with stepping(chosen, task, seed, lr, comm) as (step, training, attachment):
        comm.gather_objects(None)  # all ranks begin now
        for number in range(1, steps + 1):
            before = time.perf_counter()
            step(number)
            spent += time.perf_counter() - before
            if number % task.every == 0 or number == steps:
                scores = validated(training, comm)
                if not math.isfinite(loss := next(iter(scores.values()))):
                    return {"losses": losses, "diverged": number, "seconds": time.perf_counter() - began}
                losses.append((number, loss))
        alone, report = averaged(training, training.model, comm), attachment.report() if attachment else None
    return {
        "losses": losses,
        "scores": scores,
        "alone": alone,
        "step": max(comm.gather_objects(spent)) / steps,
        "bytes": report and report.bytes_per_step,
        "seconds": time.perf_counter() - began,
    }


def time_steps(chosen: Contender, task: Task, lr: float, steps: int, rate: float, comm: Comm) -> dict[str, Any]:
    """Return seconds ("step") and bytes ("sent") of a step while each rank sends `rate` bytes a second. Collective.

    The steps before are not timed: a period of the exchange, or `WARM_UP`. Bytes are those that TCP has delivered.
    """
    first = 1 + max(WARM_UP, chosen.period)
    with pacing.Pacer(rate), stepping(chosen, task, 1, lr, comm) as (step, _, _):
        for number in range(1, first):
            step(number)
        comm.gather_objects(None)
        before, began = pacing.sent(), time.perf_counter()
        for number in range(first, first + steps):
            step(number)
        comm.gather_objects(None)
        every = comm.gather_objects((time.perf_counter() - began, pacing.sent() - before))
    return {"step": max(took for took, _ in every) / steps, "sent": statistics.mean(sent for _, sent in every) / steps}


def validated(training: Training, comm: Comm) -> dict[str, float]:
    """Return what the task measures of the mean of all ranks' weights, which stay as they are. Collective."""
    mean = copy.deepcopy(training.model)
    mean_([p.data for p in mean.parameters()], comm)
    return averaged(training, mean, comm)


@torch.no_grad()
def averaged(training: Training, model: nn.Module, comm: Comm) -> dict[str, float]:
    """Return the means over ranks of what the task measures of a model of theirs. Collective."""
    scores = training.validate(model)
    mine = scores if isinstance(scores, Mapping) else {"loss": scores}
    every = comm.gather_objects({name: float(score) for name, score in mine.items()})
    return {name: statistics.mean(each[name] for each in every) for name in mine}
