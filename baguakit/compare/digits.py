"""Printed digits with noise, of which each rank sees some only: a task that no rank can learn alone."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from .training import Training

TRAINED, TESTED, BATCH = 4000, 1000, 32  # images; BATCH is the number in a step on each rank
SIDE, NOISE = 8, 0.22  # pixels, and the standard deviation of their noise
DIGITS = 10
FONT = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `count` images (count, 64) and their digits, at random places, with random brightness, and with noise."""
    random, images = torch.Generator().manual_seed(seed), torch.zeros(count, SIDE, SIDE, dtype=torch.float32)
    glyphs = [FONT.split()[digit::DIGITS] for digit in range(DIGITS)]
    shapes = torch.tensor([[[mark == "#" for mark in row] for row in glyph] for glyph in glyphs]).float()
    height, width = shapes.shape[1:]
    labels = torch.randint(DIGITS, (count,), generator=random)
    tops = torch.randint(SIDE - height + 1, (count, 1, 1), generator=random)
    lefts = torch.randint(1, SIDE - width, (count, 1, 1), generator=random)
    rows, columns = tops + torch.arange(height)[:, None], lefts + torch.arange(width)
    images[torch.arange(count)[:, None, None], rows, columns] = shapes[labels]
    images *= 0.5 + torch.rand(count, 1, 1, dtype=torch.float32, generator=random)
    images += NOISE * torch.randn(images.shape, dtype=torch.float32, generator=random)
    return images.flatten(1).sub_(0.35).mul_(2), labels


class Digits:
    """The training data of rank r of n, digits d with d mod n = r; and test data. Both are equal in every run."""

    def __init__(self, rank: int, ranks: int, device: torch.device | None = None) -> None:
        images, labels = drawn(TRAINED, seed=0)
        mine = labels % ranks == rank
        self.rank, self.train = rank, (images[mine].to(device), labels[mine].to(device))
        self.test = tuple(each.to(device) for each in drawn(TESTED, seed=1))

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield random batches of the training data of this rank, without end."""
        images, labels = self.train
        random = torch.Generator().manual_seed(1000 * seed + self.rank)
        while True:
            chosen = torch.randint(len(labels), (BATCH,), generator=random).to(labels.device)
            yield images[chosen], labels[chosen]


def network(seed: int, width: int = 512) -> nn.Sequential:
    """Return a network that is quick to compute and slow to send. With 512 as `width`, it has 301,066 parameters."""
    torch.manual_seed(seed)
    first, last = nn.Linear(SIDE * SIDE, width), nn.Linear(width, DIGITS)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)


@torch.no_grad()
def evaluate(model: nn.Module, digits: Digits) -> tuple[float, float]:
    """Return the test loss and the test accuracy of a network."""
    images, labels = digits.test
    read = model(images)
    return float(cross_entropy(read, labels)), float((read.argmax(1) == labels).float().mean())


def reading(seed: int, rank: int, ranks: int) -> Training:
    """Return the training of a rank, on its GPU if the ranks have NCCL."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    digits = Digits(rank, ranks, device)
    batches = digits.batches(seed)

    def loss(model: nn.Module, step: int) -> Tensor:
        images, labels = next(batches)
        return cross_entropy(model(images), labels)

    def validate(model: nn.Module) -> dict[str, float]:
        return dict(zip(("test loss", "accuracy"), evaluate(model, digits), strict=True))

    return Training(network(seed).to(device), loss, validate)
