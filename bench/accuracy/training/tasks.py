"""Three trainings: a transformer, a network of matrices, and a table of embeddings."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import baguakit as bk
from baguakit.compare import digits, language
from baguakit.compare.language import text
from baguakit.compare.training import optimizers_of
from bench.network import tasks as networks


class Training(NamedTuple):
    """A training that has begun: `loss` is that of a batch of this rank at some step, `test` that of the model.

    `test` takes the communicator, and is collective.
    """

    model: nn.Module
    optimizer: Optimizer
    loss: Callable[[int], Tensor]
    test: Callable[[bk.Comm], float]


@dataclass(frozen=True)
class Task(ABC):
    """A training of so many `steps`, whose learning rate rises for `warmup` steps and then falls to zero linearly."""

    steps: int
    lr: float
    warmup: int = 0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, which is 1 or more."""
        return self.lr * min(1.0, step / max(1, self.warmup)) * (1 - (step - 1) / self.steps)

    def train(self, training: Training) -> Iterator[int]:
        """Train, and yield the number of each step after it."""
        for step in range(1, self.steps + 1):
            for group in training.optimizer.param_groups:
                group["lr"] = self.rate(step)
            training.optimizer.zero_grad()
            training.loss(step).backward()
            training.optimizer.step()
            yield step

    @abstractmethod
    def begin(self, seed: int, rank: int, ranks: int) -> Training:
        """Return the same model on all ranks, and the batches of one rank."""


@dataclass(frozen=True)
class Language(Task):
    """The byte-level GPT of `examples/language_model.py` on the sources of Python's own library, with AdamW."""

    layers: int = 2
    width: int = 128
    heads: int = 4
    context: int = 64

    def begin(self, seed: int, rank: int, ranks: int) -> Training:
        windows, held_out, _ = text(self.context)
        torch.manual_seed(seed)
        model = language.GPT(self.layers, self.width, self.heads)
        (optimizer,) = optimizers_of(model, "adamw", self.lr)
        return Training(
            model,
            optimizer,
            lambda step: language.loss_of(model, language.drawn(windows, 8, seed, step, rank)),
            lambda comm: sum(comm.gather_objects(language.bits_per_byte(model, held_out, rank, ranks, 512))) / ranks,
        )


@dataclass(frozen=True)
class Digits(Task):
    """The digits of `baguakit demo`, of which each rank sees some only, with SGD and momentum."""

    def begin(self, seed: int, rank: int, ranks: int) -> Training:
        data, model = digits.Digits(rank, ranks), digits.network(seed)
        batches = data.batches(seed)
        optimizer = SGD(model.parameters(), self.lr, momentum=0.9)
        return Training(
            model, optimizer, lambda _: _loss(model, next(batches)), lambda _: digits.evaluate(model, data)[0]
        )


@dataclass(frozen=True)
class Table(Task):
    """The table of embeddings of `bench.network.tasks`, a vector for each level of each pixel, with SGD."""

    width: int = 1024

    def begin(self, seed: int, rank: int, ranks: int) -> Training:
        data = networks.Digits(ranks * seed + rank)
        torch.manual_seed(seed)
        model = networks.Embedding(self.width)
        batches = data.batches(8)
        return Training(
            model,
            SGD(model.parameters(), self.lr),
            lambda _: _loss(model, next(batches)),
            torch.no_grad()(lambda _: float(_loss(model, data.test))),
        )


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])
