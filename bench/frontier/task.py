"""The training that all contenders share: a byte-level GPT on the sources of Python's own library."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import baguakit as bk
from bench.accuracy.training.tasks import example, text


@dataclass(frozen=True)
class Task:
    """A GPT of 3.2 million values, and how it is trained.

    Attributes:
        layers, width, heads: of the transformer.
        context, batch: bytes of a window, and windows of a rank in a step.
        warmup: steps in which the learning rate rises; then it stays, so that losses at all steps compare.
        every: steps between validations.
        windows: held-out windows of a validation.
    """

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 64
    batch: int = 2
    warmup: int = 50
    every: int = 50
    windows: int = 256

    def begin(self, seed: int) -> nn.Module:
        """Return the model, equal on all ranks."""
        torch.manual_seed(seed)
        model: nn.Module = example().GPT(self.layers, self.width, self.heads)
        return model

    def optimizers(self, model: nn.Module, name: str, lr: float) -> list[Optimizer]:
        """Return the optimizers of a name: "adamw", "muon" (matrices; AdamW for the rest) or "sgd"."""
        found: list[Optimizer] = example().optimizers_of(model, name, lr)
        return found

    def rate(self, lr: float, step: int) -> float:
        """Return the learning rate of a step, which is 1 or more."""
        return lr * min(1.0, step / self.warmup)

    def loss(self, model: nn.Module, seed: int, step: int, rank: int) -> Tensor:
        """Return the loss of the batch of a rank at a step, which depends on nothing else."""
        batch = example().drawn(text(self.context)[0], self.batch, seed, step, rank)
        return example().loss_of(model, batch)  # type: ignore[no-any-return]

    def validate(self, model: nn.Module, comm: bk.Comm) -> float:
        """Return the loss in bits per byte on held-out text. Collective."""
        return float(example().bits_per_byte(model, text(self.context)[1], comm, count=self.windows))

    def described(self) -> dict[str, Any]:
        """Return what a result depends on: the values of this task, and the digest of the text."""
        return asdict(self) | {"text": text(self.context)[2]}


TASK = Task()
