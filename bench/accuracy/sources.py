"""Values to be written: of four distributions, and gradients of three trainings, early and late."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .training.tasks import Digits, Language, Table, Task

VALUES, SEED = 1 << 20, 1
RUN = 64  # values that share a scale

TRAININGS: dict[str, tuple[Task, tuple[int, int]]] = {
    "transformer": (Language(600, 3e-3, 50, layers=4, width=160, heads=5, context=128), (10, 600)),
    "digits": (Digits(300, 0.05), (10, 300)),
    "embeddings": (Table(200, 0.2), (10, 200)),
}


@dataclass(frozen=True)
class Source:
    """A tensor (n,) of a name.

    Attributes:
        draws: whether biases are measured on it.
        parts: of a gradient, by parameter.
    """

    name: str
    values: Tensor
    draws: bool = True
    parts: dict[str, Tensor] = field(default_factory=dict)

    def groups(self) -> dict[str, Tensor]:
        """Return the gradients of all parameters of a kind, such as the queries of all layers."""
        found: dict[str, list[Tensor]] = {}
        for name, part in self.parts.items():
            found.setdefault(name.split(".")[-2], []).append(part)
        return {name: torch.cat(several) for name, several in found.items()}


def distributions(values: int = VALUES) -> Iterator[Source]:
    """Yield so many values of each of four distributions; always the same."""
    random = torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    yield Source("normal", normal(values))
    yield Source("Student-t(3)", normal(values) / normal(3, values).square().mean(0).sqrt())
    rare = torch.rand(values, generator=random) < 1e-3
    yield Source("outliers", normal(values) * torch.where(rare, 30.0, 1.0))
    yield Source("log-normal scales", normal(values) * normal(values // RUN).exp().repeat_interleave(RUN))


def gradients() -> Iterator[Source]:
    """Yield the gradients of trainings of one rank at two steps each: of the batch of that step."""
    for name, (task, steps) in TRAININGS.items():
        model, optimizer, loss, _ = task.begin(SEED, 0, 1)
        for step in range(1, max(steps) + 1):
            for group in optimizer.param_groups:
                group["lr"] = task.rate(step)
            optimizer.zero_grad()
            loss(step).backward()
            if step in steps:
                parts = {of: p.grad.flatten().clone() for of, p in model.named_parameters() if p.grad is not None}
                late = step == max(steps)
                yield Source(f"{name}, step {step}", torch.cat(list(parts.values())), late, parts)
            optimizer.step()
