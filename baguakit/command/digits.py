"""The task of the demo and its training: rank r of n sees printed digits d with d mod n = r, under noise."""

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from ..attach import attach
from ..comm import Comm
from ..primitives import mean_
from ..rules import Algorithm
from .pacing import Pacer, measured

TRAINED, TESTED, BATCH = 4000, 1000, 32  # images; BATCH is the number in a step on each rank
SIDE, NOISE = 8, 0.22  # pixels, and the standard deviation of their noise
DIGITS = 10
POINTS = 20  # of a curve
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
    """Return `count` images (count, 64) and their digits: each digit at a random place, in random ink, under noise."""
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
    """The training data of one rank, and the test data of all, as (images, labels); always the same."""

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


@dataclass(frozen=True)
class Contender:
    """A way to train."""

    name: str  # the name of a function in `bk.algorithms`, and after a comma the variant
    algorithm: Algorithm
    lr: float = 0.05  # at the beginning; it falls to zero linearly
    momentum: float = 0.9  # of the optimizer; 0 where the algorithm has its own
    reaches: float = 0.9  # the test accuracy that it must reach
    needs_nodes: bool = False  # whether its ranks are divided into nodes of two
    telling: bool = False  # whether it is run by default and drawn

    @property
    def family(self) -> str:
        """Return the name without the variant."""
        return self.name.split(",")[0]


@dataclass(frozen=True)
class Result:
    """The outcome of a contender, by its name."""

    contender: str
    alone: float  # the test accuracy of a rank's own network, the mean over ranks
    merged: float  # the test accuracy of the mean of the networks
    sent: float  # bytes that this rank sent in a step
    between_nodes: float  # bytes of `sent` that left its node
    seconds: float  # of a step, the mean
    curve: tuple[tuple[float, float, float], ...]  # (bytes sent, seconds spent, loss of the mean of the networks)

    @property
    def accuracy(self) -> float:
        """Return the accuracy to show; without communication `alone`, since an average would be communication."""
        return self.merged if self.sent else self.alone


def prepare(kept: dict[str, Any], rate: float | None) -> tuple[str, tuple[float, float] | None]:
    """Make the communicator and the data, and keep this rank below `rate` bytes a second from now on. Collective.

    It returns the place where ranks train, in words, and the measured rates in bytes a second.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    torch.set_num_threads(1)  # ranks share the cores
    comm = Comm()
    if has_nodes(comm.size):
        comm = Comm(mesh=init_device_mesh(device.type, (comm.size // 2, 2), mesh_dim_names=("inter", "intra")))
    kept.update(comm=comm, digits=Digits(comm.rank, comm.size, device))
    place = "on the CPU, over gloo" if device.type == "cpu" else "a GPU each, over NCCL"
    if rate is None:
        return place, None
    kept["pacer"] = Pacer(rate)
    return place, measured(comm, rate)


def train(kept: dict[str, Any], contender: Contender, steps: int, seed: int) -> Result:
    """Train a new network, always the same one, on the same batches; return the outcome. Collective.

    The time of copies for the curve is not counted.
    """
    comm, digits = kept["comm"], kept["digits"]
    model = network(seed).to(digits.train[0].device)
    optimizer = torch.optim.SGD(model.parameters(), lr=contender.lr, momentum=contender.momentum)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    moments = {round(steps ** (i / POINTS)) for i in range(POINTS + 1)}  # evenly spaced on a logarithmic axis
    batches, spent, snapshots = digits.batches(seed), 0.0, []
    attachment = attach(model, optimizer, contender.algorithm, comm=comm)
    comm.gather_objects(None)  # from here on all ranks train
    for step in range(1, steps + 1):
        began = time.perf_counter()
        images, labels = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
        spent += time.perf_counter() - began
        if step in moments:  # evaluated after training: an average now would make fast ranks wait
            snapshots.append((attachment.report().bytes_sent, spent, copy.deepcopy(model)))
    report = attachment.report()
    seconds = max(comm.gather_objects(spent)) / steps
    alone = float(mean_(evaluate(model, digits)[1], comm))
    attachment.merge()
    attachment.detach()
    curve = []
    for sent, passed, then in snapshots:
        mean_([p.data for p in then.parameters()], comm)
        curve.append((sent, passed, evaluate(then, digits)[0]))
    between_nodes = sum(row.bytes.get("inter", 0) for row in report.rows) / steps
    merged = float(evaluate(model, digits)[1])
    return Result(contender.name, alone, merged, report.bytes_per_step, between_nodes, seconds, tuple(curve))


def has_nodes(ranks: int) -> bool:
    """Return whether the ranks can be divided into several nodes of two."""
    return ranks >= 4 and ranks % 2 == 0
