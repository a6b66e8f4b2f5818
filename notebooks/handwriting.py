"""The handwritten digits that scikit-learn ships, of which each rank holds only some: what the notebooks train on."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

TESTED = 360  # of 1,797 images


@dataclass(frozen=True)
class Digits:
    """Images (n, 64) of values from 0 to 1 and labels (n,): to train on, and to test."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def batches(
        self, rank: int, size: int, steps: int, batch: int = 64, seed: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Random batches of what rank `rank` of `size` holds: the digits d with d mod size = rank, and no others."""
        mine = torch.where(self.labels % size == rank)[0]
        draw = torch.Generator().manual_seed(1000 * seed + rank)
        for _ in range(steps):
            chosen = mine[torch.randint(len(mine), (batch,), generator=draw)]
            yield self.images[chosen], self.labels[chosen]

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """The share of the test images that a network reads."""
        return float((model(self.test_images).argmax(1) == self.test_labels).float().mean())

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """The mean cross entropy over the test images."""
        return float(cross_entropy(model(self.test_images), self.test_labels))


def digits() -> Digits:
    """The digits, divided in the same way every time."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    tested, trained = order[:TESTED], order[TESTED:]
    return Digits(x[trained], y[trained], x[tested], y[tested])


def network(width: int = 96, seed: int = 0) -> nn.Sequential:
    """A network of two layers, the same on every rank: 7,210 parameters as it is."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
