"""Steps through the memory of the host, beside steps on the CPU: `python -m bench.network staged`.

The same model trains on the CPU and on the device of the tests (`tests/late_device.py`), for which baguakit has no
kernels: each flight copies its bucket to the host, computes there, and copies the result back. Here the device works at
once, on the cores of the host, so the same work is done in both trainings, and they differ by the host lane.

    staged                the device has streams, as GPUs do: the lane copies on a stream of its own
    staged, no streams    it has none, as MPS: every copy is over when it returns

All take turns, step by step, in one process on each host. A time is what the slowest rank needs for a step, from a
barrier on. At the end all weights must be equal, bit by bit; else no time is told. Steps without communication say what
the device, which is written in Python, takes by itself. glibc keeps freed memory for all ways, as allocators of devices
do: otherwise the gradients of a step are new pages, or not, by how the heap happens to lie, which is up to 9 ms a step.
"""

import contextlib
import ctypes
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import baguakit as bk

from .contenders import ALONE, FOUR_BITS, Contender, contender
from .exchanges import told
from .tasks import Digits, task
from .train import on_every_host, step

sys.path.append(str(Path(__file__).parents[2] / "tests"))
import late_device

HOSTS, TASK, WARM_UP = 2, "wide", 2
REPEATS = {"100mbit": 9, "500mbit": 25}
ALGORITHMS = (ALONE, "gradient_allreduce", "bytegrad", FOUR_BITS[1].name)
CPU = "CPU"
MALLOPT = {-8: 1, -3: 1 << 25, -1: 2**31 - 1, -2: 1 << 26}  # one arena, and bounds of mmap, trimming and padding
STREAMS = {CPU: True, "staged": True, "staged, no streams": False}  # of the device that is not the CPU


def cells(quick: bool) -> list[dict[str, Any]]:
    """Return the cases to measure; quick: one algorithm, beside no communication."""
    names = ALGORITHMS[::2] if quick else ALGORITHMS
    return [
        {"hosts": HOSTS, "rate": rate, "algorithm": name, "repeats": repeats}
        for (rate, repeats), name in itertools.product(REPEATS.items(), names)
    ]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Train in all ways, step by step in turns; every rank returns the same result. Collective."""
    late_device.install()
    chosen, comm = contender(cell["algorithm"]), bk.Comm()
    mine: dict[str, list[float]] = {way: [] for way in STREAMS}
    with contextlib.ExitStack() as stack:
        trainings = {way: stack.enter_context(training(way, chosen, comm.rank)) for way in STREAMS}
        for _, (way, (take_step, settle, _)) in itertools.product(range(WARM_UP + cell["repeats"]), trainings.items()):
            dist.barrier()
            began = time.perf_counter()
            take_step()
            mine[way].append(time.perf_counter() - began)
            settle()
        weights = [nn.utils.parameters_to_vector(model.parameters()).cpu() for *_, model in trainings.values()]
    if not all(torch.equal(each, weights[0]) for each in weights):
        raise AssertionError(f"the weights of {list(STREAMS)} are not equal on rank {comm.rank}: not timed")
    every = comm.gather_objects(mine)
    slowest = {way: list(map(max, *(one[way] for one in every)))[WARM_UP:] for way in STREAMS}
    return {way: {**told(times), "least": min(times)} for way, times in slowest.items()}


@contextlib.contextmanager
def training(
    way: str, chosen: Contender, rank: int
) -> Iterator[tuple[Callable[[], None], Callable[[], None], nn.Module]]:
    """Attach an algorithm to a model; yield a function that takes a step, one that waits for its end, and the model."""
    device, flavour = "cpu" if way == CPU else late_device.NAME, partial(late_device.flavour, STREAMS[way], prompt=True)
    torch.manual_seed(0)
    with flavour():
        model = task(TASK).model().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=chosen.lr, momentum=chosen.momentum, foreach=False)
        batches = Digits(rank).batches(task(TASK).batch)

        def take_step() -> None:
            with flavour():
                step(model, optimizer, *(each.to(device) for each in next(batches)))

        def settle() -> None:
            """Wait for what the step has left to the lane: with error feedback, ranks decide there what to keep."""
            with flavour():
                attached.state_dict()

        with bk.attach(model, optimizer, chosen.algorithm) as attached:
            yield take_step, settle, model


if __name__ == "__main__":
    for option, value in MALLOPT.items():
        ctypes.CDLL(None).mallopt(option, value)
    on_every_host(measure)
