"""The task: read printed digits under noise. Rank r of n sees only those with d mod n = r."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

TRAINED, TESTED, BATCH = 4000, 1000, 32  # images; the last are those of a step on each rank
SIDE, NOISE = 8, 0.22  # pixels, and the standard deviation of what is added to each
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


def glyphs() -> Tensor:
    """Return the ten digits (10, 7, 5): 1 where there is ink."""
    rows = [line.split() for line in FONT.split("\n") if line]
    return torch.tensor([[[mark == "#" for mark in row[digit]] for row in rows] for digit in range(DIGITS)]).float()


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `count` images (count, 64) and their digits: each digit at a random place, in random ink, under noise."""
    random = torch.Generator().manual_seed(seed)
    shapes, images = glyphs(), torch.zeros(count, SIDE, SIDE, dtype=torch.float32)
    height, width = shapes.shape[1:]
    labels = torch.randint(DIGITS, (count,), generator=random)
    tops = torch.randint(SIDE - height + 1, (count,), generator=random)
    lefts = torch.randint(1, SIDE - width, (count,), generator=random)
    rows, columns = tops[:, None] + torch.arange(height), lefts[:, None] + torch.arange(width)
    images[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]] = shapes[labels]
    images *= 0.5 + torch.rand(count, 1, 1, dtype=torch.float32, generator=random)
    images += NOISE * torch.randn(images.shape, dtype=torch.float32, generator=random)
    return images.flatten(1).sub_(0.35).mul_(2), labels


class Digits:
    """The training data of one rank, and the test data of all, as (images, labels); always the same."""

    def __init__(self, rank: int, ranks: int, device: torch.device | None = None) -> None:
        images, labels = drawn(TRAINED, seed=0)
        mine = labels % ranks == rank
        test_images, test_labels = drawn(TESTED, seed=1)
        self.rank = rank
        self.train = images[mine].to(device), labels[mine].to(device)
        self.test = test_images.to(device), test_labels.to(device)

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield random batches of the training data of this rank, without end."""
        images, labels = self.train
        random = torch.Generator().manual_seed(1000 * seed + self.rank)
        while True:
            chosen = torch.randint(len(labels), (BATCH,), generator=random).to(labels.device)
            yield images[chosen], labels[chosen]


def network(seed: int, width: int = 512) -> nn.Sequential:
    """Return a network of 301,066 parameters: quick to compute and slow to send."""
    torch.manual_seed(seed)
    first, last = nn.Linear(SIDE * SIDE, width), nn.Linear(width, DIGITS)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)


@torch.no_grad()
def evaluate(model: nn.Module, digits: Digits) -> tuple[float, Tensor]:
    """Return the test loss and the test accuracy of a network."""
    images, labels = digits.test
    read = model(images)
    return float(cross_entropy(read, labels)), (read.argmax(1) == labels).float().mean()
