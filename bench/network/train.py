"""The program of a host, which measures cells: `python -m bench.network.train '[{"task": "wide", …}, …]'`.

A step is timed from the end of the one before. Before anything is measured the same ranks compute alone for a while,
and `WARM_UP` steps of the algorithm pass, and two rounds of its at least, in which connections are made, codecs are
compiled, and memory is used for the first time.
"""

import copy
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import baguakit as bk
from bench.netlab.counters import Counters, of_interface

from .contenders import WARM_UP, Contender, contender, parameters_shapes
from .runs import MARK, Cell
from .steps import SLOWNESS
from .tasks import Digits, Task, task

ALONE = 8  # steps to learn what a step costs without communication


def measure(cell: Cell) -> dict[str, Any]:
    """Train a cell on all hosts; every rank returns the same result. Collective."""
    chosen, what, comm = contender(cell["algorithm"]), task(cell["task"]), bk.Comm()
    digits = Digits(comm.rank)
    torch.manual_seed(0)
    model = what.model()
    forward, whole = alone(model, chosen, what, comm)
    nap = (SLOWNESS - 1) * forward if cell["straggler"] and comm.rank == comm.size - 1 else 0.0
    optimizer = optimizer_of(model, chosen, what)
    batches = digits.batches(what.batch)

    with chosen.train(model, optimizer) as (called, attachment):
        for _ in range(max(WARM_UP, 2 * chosen.period)):
            step(called, optimizer, *next(batches))
        dist.barrier()
        claimed, before, began = claims(attachment), counted(), time.perf_counter()
        ends, losses = [], []
        for _ in range(cell["steps"]):
            time.sleep(nap)
            losses.append(step(called, optimizer, *next(batches)))
            ends.append(time.perf_counter() - began)
        after = counted()
        claimed = claims(attachment) - claimed
        dist.barrier()
        bk.primitives.mean_([p.data for p in model.parameters()], comm)
        test_loss, accuracy = tested(model, digits)

    steps, period = cell["steps"], chosen.period
    every = comm.gather_objects(
        {
            "ends": ends,
            "losses": losses,
            "sent": (after - before).sent / steps / share(comm.size),
            "payload": (after - before).payload / steps / share(comm.size),
            "claimed": claimed / steps,
            "compute": whole,
            "forward_backward": forward,
        }
    )
    blocks = [blocks_of(each["ends"], period) for each in every]
    shapes = parameters_shapes(model)
    return {
        "step": statistics.median(blocks[0]),
        "quartiles": statistics.quantiles(blocks[0], n=4, method="inclusive") if len(blocks[0]) > 1 else None,
        "step_by_rank": [statistics.median(block) for block in blocks],
        "compute": statistics.median(each["compute"] for each in every),
        "forward_backward": statistics.median(each["forward_backward"] for each in every),
        "batch": what.batch,
        "values": sum(shape.numel() for shape in shapes),
        "formula": None if chosen.sends is None else chosen.sends(shapes, comm.size),
        "sent": statistics.mean(each["sent"] for each in every),
        "payload": statistics.mean(each["payload"] for each in every),
        "claimed": statistics.mean(each["claimed"] for each in every) if attachment is not None else None,
        "seconds": ends,
        "losses": [statistics.mean(each["losses"][i] for each in every) for i in range(steps)],
        "test_loss": test_loss,
        "accuracy": accuracy,
    }


def alone(model: nn.Module, chosen: Contender, what: Task, comm: bk.Comm) -> tuple[float, float]:
    """Seconds of forward and backward, and of a whole step, with all ranks at work and nothing exchanged."""
    model = copy.deepcopy(model)
    optimizer, batches = optimizer_of(model, chosen, what), Digits(comm.rank).batches(what.batch)
    dist.barrier()
    part, whole = [], []
    for _ in range(ALONE):
        began = time.perf_counter()
        optimizer.zero_grad()
        images, labels = next(batches)
        cross_entropy(model(images), labels).backward()
        part.append(time.perf_counter() - began)
        optimizer.step()
        whole.append(time.perf_counter() - began)
    dist.barrier()
    return statistics.median(part[2:]), statistics.median(whole[2:])


def optimizer_of(model: nn.Module, chosen: Contender, what: Task) -> torch.optim.Optimizer:
    """Plain SGD: what remains is the algorithm's."""
    lr, momentum = what.sgd or (chosen.lr, chosen.momentum)
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """One step of training; its loss."""
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def blocks_of(ends: list[float], period: int) -> list[float]:
    """The mean step of each whole period; of all steps, where not one period is whole."""
    if len(ends) < period:
        return [ends[-1] / len(ends)]
    marks = [0.0, *ends[period - 1 :: period]]
    return [(later - earlier) / period for earlier, later in itertools.pairwise(marks)]


@torch.no_grad()
def tested(model: nn.Module, digits: Digits) -> tuple[float, float]:
    """Loss and accuracy on images that no rank has trained on."""
    images, labels = digits.test
    out = model.eval()(images)
    return float(cross_entropy(out, labels)), float((out.argmax(1) == labels).float().mean())


def counted() -> Counters:
    """Return the counters of this host's interface."""
    return of_interface(os.environ["GLOO_SOCKET_IFNAME"])


def share(ranks: int) -> int:
    """Return how many ranks share an interface: all of them on loopback, otherwise one."""
    return ranks if os.environ["GLOO_SOCKET_IFNAME"] == "lo" else 1


def claims(attachment: Any) -> float:
    """Bytes that the attachment says it has sent."""
    return float(attachment.report().bytes_sent) if attachment is not None else 0.0


def on_every_host(work: Callable[[Cell], Any]) -> None:
    """Meet the other hosts, measure the cells that the command line names, and let rank 0 print each result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for cell in json.loads(sys.argv[1]):
        result = work(cell)
        if dist.get_rank() == 0:
            print(MARK + json.dumps(result), flush=True)
    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    on_every_host(measure)
