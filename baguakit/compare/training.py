"""A task, which "MODULE:FUNCTION" names, and its training on a rank: losses by step, and the costs of a step."""

import contextlib
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from ..attach import Attachment
from ..comm import Comm
from ..primitives import mean_
from . import language, pacing
from .contenders import Contender
from .names import named, source_of

OPTIMIZERS = ("adamw", "momentum", "muon", "sgd")
GPT = "baguakit.compare.language:gpt"
WARM_UP = 4  # steps in which connections are made and kernels compiled


class Training(NamedTuple):
    """The training of one rank, which a task's function returns; a tuple of the three does as well.

    Attributes:
        model: equal on all ranks.
        loss: `loss(model, step)` calls `model` on this rank's batch of a step, 1 or more, and returns the loss.
        validate: `validate(model)` returns a number to minimise, or {name: number} with that number first.
    """

    model: nn.Module
    loss: Callable[[nn.Module, int], Tensor]
    validate: Callable[[nn.Module], float | Mapping[str, float]]


@dataclass(frozen=True)
class Task:
    """A task. The learning rate rises for `warmup` steps and then stays, so that losses at all steps compare."""

    place: str = GPT  # "module:function"; the function of (seed, rank, number of ranks) returns a `Training`
    warmup: int = 50
    every: int = 50  # steps between validations

    def begin(self, seed: int, rank: int, ranks: int) -> Training:
        """Call the function; raise a TypeError that names it if it does not return a training."""
        found = named(self.place)(seed, rank, ranks)
        if not isinstance(found, tuple) or len(found) != 3 or not isinstance(found[0], nn.Module):
            raise TypeError(f"{self.place} returns a tuple (model, loss, validate), not {type(found).__name__}")
        return Training(*found)

    def __str__(self) -> str:
        kind, digest = [*self.facts().items()][-1]
        return (
            f"{self.place} ({kind} {digest or 'unknown'}), warm-up of {self.warmup} steps, validated every {self.every}"
        )

    def facts(self) -> dict[str, Any]:
        """Return what a result depends on, for JSON; last the digest of the data, or of the source."""
        data = {"text": language.text(language.CONTEXT)[2]} if self.place == GPT else {"source": source_of(self.place)}
        return asdict(self) | data


def optimizers_of(model: nn.Module, name: str, lr: float) -> list[Optimizer]:
    """Return the optimizers of a name in `OPTIMIZERS`; "muon" steps weights of linear layers, and AdamW the rest."""
    if name in ("sgd", "momentum"):
        return [SGD(model.parameters(), lr, momentum=0.9 if name == "momentum" else 0.0)]
    matrices = [each.weight for each in model.modules() if isinstance(each, nn.Linear) and name == "muon"]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    first: list[Optimizer] = [AdamW(others, lr, betas=(0.9, 0.95))]
    return [*first, Muon(matrices, lr, adjust_lr_fn="match_rms_adamw")] if matrices else first


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
