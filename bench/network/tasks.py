"""The tasks: handwritten digits, learned by networks of opposite nature. Every rank draws from all images."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

TESTED = 360  # of 1,797 images
PIXELS, LEVELS = 64, 17  # of an image, and of a pixel
WIDE, LONG = 1960, 3660


@dataclass(frozen=True)
class Task:
    """A network and the size of its batches.

    Attributes:
        name, about: in a word and in a sentence.
        batch: images of a rank in a step.
        sgd: learning rate and momentum of plain SGD, where they are not those of the contender.
    """

    name: str
    about: str
    batch: int
    sgd: tuple[float, float] | None = None

    def model(self) -> nn.Module:
        """The network, its weights drawn from torch's generator."""
        return {"wide": wide, "deep": deep, "embedding": Embedding}[self.name]()


TASKS = (
    Task("wide", "an MLP of 4.0 M values, 8 images a rank: bound by the network", 8),
    Task("deep", "a ConvNet of 0.3 M values, 32 images a rank: bound by its arithmetic", 32),
    Task("embedding", "a table of 4.0 M values, 8 images a rank: hardly anything to compute", 8, (0.05, 0.0)),
)


def task(name: str) -> Task:
    """The task of a name."""
    return next(each for each in TASKS if each.name == name)


def wide() -> nn.Module:
    """Three matrices: much to send, little to compute."""
    layers = (nn.Linear(64, WIDE), nn.ReLU(), nn.Linear(WIDE, WIDE), nn.ReLU(), nn.Linear(WIDE, 10))
    return nn.Sequential(nn.Flatten(), *layers)


def deep() -> nn.Module:
    """Convolutions: each value is used at 64 places. GroupNorm, so that small batches do."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 64), (64, 128), (128, 128), (128, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))


class Embedding(nn.Module):
    """A vector for each level of each pixel; an image is the sum of its own, seen by a linear layer.

    Of the vectors few are read and none is multiplied: what a step takes is what the network takes.
    """

    def __init__(self, width: int = LONG) -> None:
        super().__init__()
        self.vectors = nn.EmbeddingBag(PIXELS * LEVELS, width, mode="sum")
        self.head = nn.Linear(width, 10)
        self.register_buffer("first", LEVELS * torch.arange(PIXELS), persistent=False)
        nn.init.normal_(self.vectors.weight, std=1 / 16)

    def forward(self, images: Tensor) -> Tensor:
        """Scores (n, 10) of images (n, 1, 8, 8) from 0 to 1."""
        levels = (images.flatten(1) * (LEVELS - 1)).round().long()
        scores: Tensor = self.head(self.vectors(self.first + levels).relu())
        return scores


class Digits:
    """The images: `test`, the same for all, and batches of the others, drawn by each rank for itself."""

    def __init__(self, rank: int) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.test = images[order[:TESTED]], labels[order[:TESTED]]
        self._images, self._labels = images[order[TESTED:]], labels[order[TESTED:]]
        self._random = torch.Generator().manual_seed(1 + rank)

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end."""
        while True:
            chosen = torch.randint(len(self._labels), (size,), generator=self._random)
            yield self._images[chosen], self._labels[chosen]
