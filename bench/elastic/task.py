"""The task: a teacher's answers, every fifth of them wrong. Examples never repeat: no rank needs a part of its own."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

INPUTS, WIDTH, CLASSES, BATCH = 128, 512, 10, 32
WRONG = 0.2  # of the answers
LR, MOMENTUM = 0.05, 0.9


def network(width: int = WIDTH) -> nn.Sequential:
    """Return the network that learns, equal on all ranks: 0.33 M values."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES)
    )


class Teacher:
    """The one who answers: a network of random weights that do not change."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.first = torch.randn(INPUTS, 32, generator=generator) / INPUTS**0.5
        self.second = torch.randn(32, CLASSES, generator=generator)

    def examples(self, count: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return so many inputs (count, INPUTS) and their answers (count)."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, INPUTS, generator=generator)
        right = ((x @ self.first).tanh() @ self.second).argmax(1)
        wrong = torch.rand(count, generator=generator) < WRONG
        return x, torch.where(wrong, torch.randint(CLASSES, (count,), generator=generator), right)


def loss_of(weights: Tensor) -> float:
    """Return the loss in bits, on examples that nobody trained on, of a network whose weights these are, flat."""
    model = network()
    nn.utils.vector_to_parameters(weights, model.parameters())
    x, y = Teacher().examples(8192, seed=-1)
    with torch.no_grad():
        return cross_entropy(model(x), y).item() / torch.tensor(2.0).log().item()
