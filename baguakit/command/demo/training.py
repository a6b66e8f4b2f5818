"""The part of the demo that runs on every rank: it keeps one training, and makes some steps of it in each call."""

import copy
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from ...attach import attach
from ...comm import Comm
from ...primitives import mean_
from ..pacing.pacer import Pacer, measured
from .contenders import CONTENDERS, Contender, has_nodes
from .digits import Digits, evaluate, network

POINTS = 20  # of a curve


@dataclass(frozen=True)
class Point:
    """The state of a training at some step: bytes sent and seconds spent so far, and the test loss."""

    sent: float
    seconds: float
    loss: float


@dataclass(frozen=True)
class Result:
    """The outcome of a contender.

    Attributes:
        contender: its name.
        alone: the test accuracy of a rank's own network, the mean over ranks.
        merged: the test accuracy of the mean of the networks.
        sent: bytes that this rank sent in a step.
        between_nodes: those of them that left its node.
        seconds: of a step, the mean.
        curve: the test loss of the mean of the networks at some steps.
    """

    contender: str
    alone: float
    merged: float
    sent: float
    between_nodes: float
    seconds: float
    curve: tuple[Point, ...]

    @property
    def accuracy(self) -> float:
        """Return the accuracy to show: an average of networks would be communication where there is none."""
        return self.merged if self.sent else self.alone


@dataclass
class Training:
    """A training that has begun."""

    contender: Contender
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    batches: Iterator[tuple[Tensor, Tensor]]
    attachment: Any
    moments: set[int]
    done: int = 0
    seconds: float = 0.0
    snapshots: list[tuple[float, float, nn.Module]] = field(default_factory=list)

    def advance(self, steps: int) -> None:
        """Make some steps. The time of copies for the curve is not counted."""
        for _ in range(steps):
            began = time.perf_counter()
            images, labels = next(self.batches)
            self.optimizer.zero_grad()
            cross_entropy(self.model(images), labels).backward()
            self.optimizer.step()
            self.schedule.step()
            self.done += 1
            self.seconds += time.perf_counter() - began
            if self.done in self.moments:  # evaluated afterwards: an average now would make fast ranks wait
                sent = self.attachment.report().bytes_sent
                self.snapshots.append((sent, self.seconds, copy.deepcopy(self.model)))


def prepare(kept: dict[str, Any], rate: float | None) -> tuple[str, tuple[float, float] | None]:
    """Make the communicator and the data, and keep this rank below `rate` bytes a second from now on. Collective.

    Returns:
        The place where ranks train, in words, and the measured rates in bytes a second.
    """
    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) and dist.get_backend() == "nccl"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if enough else torch.device("cpu")
    torch.set_num_threads(1)  # ranks share the cores
    mesh, ranks = None, dist.get_world_size()
    if has_nodes(ranks):
        mesh = init_device_mesh(device.type, (ranks // 2, 2), mesh_dim_names=("inter", "intra"))
    kept["comm"] = comm = Comm(mesh=mesh)
    kept["digits"] = Digits(comm.rank, ranks, device)
    rates = None
    if rate is not None:
        kept["pacer"] = Pacer(rate)
        rates = measured(comm, rate)
    return "a GPU each, over NCCL" if enough else "on the CPU, over gloo", rates


def begin(kept: dict[str, Any], name: str, steps: int, seed: int) -> None:
    """Begin to train a new network: always the same one, on the same batches. Collective."""
    comm, digits = kept["comm"], kept["digits"]
    contender = next(each for each in CONTENDERS if each.name == name)
    model = network(seed).to(digits.train[0].device)
    optimizer = torch.optim.SGD(model.parameters(), lr=contender.lr, momentum=contender.momentum)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    moments = {round(steps ** (i / POINTS)) for i in range(POINTS + 1)}  # evenly spaced on a logarithmic axis
    attachment = attach(model, optimizer, contender.algorithm, comm=comm)
    comm.gather_objects(None)  # from here on all ranks train
    kept["training"] = Training(contender, model, optimizer, schedule, digits.batches(seed), attachment, moments)


def advance(kept: dict[str, Any], steps: int) -> None:
    """Make some steps. Collective."""
    kept["training"].advance(steps)


def finish(kept: dict[str, Any]) -> Result:
    """End the training, and return its outcome. Collective."""
    comm, digits, training = kept["comm"], kept["digits"], kept.pop("training")
    attachment, steps = training.attachment, training.done
    report = attachment.report()
    seconds = max(comm.gather_objects(training.seconds)) / steps
    alone = float(mean_(evaluate(training.model, digits)[1], comm))
    attachment.merge()
    attachment.detach()
    curve = []
    for sent, passed, then in training.snapshots:
        mean_([p.data for p in then.parameters()], comm)
        curve.append(Point(sent, passed, evaluate(then, digits)[0]))
    between_nodes = sum(row.bytes.get("inter", 0) for row in report.rows) / steps
    merged = float(evaluate(training.model, digits)[1])
    name = training.contender.name
    return Result(name, alone, merged, report.bytes_per_step, between_nodes, seconds, tuple(curve))
