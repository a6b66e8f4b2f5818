"""The speed of this rank's machine: copies, compressors, lanes, and the slowdown by a second thread.

Ranks of one machine share its cores and its memory, and in training they do the same work at the same time. So all
begin together and repeat a work for long enough that each has had turns on the cores; the mean counts. The median would
be that of the repetitions during which no other rank had a turn.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing

import torch
from torch import Tensor

from ..compressors import Compressor
from ..costs import Codec
from ..lanes import lane

VALUES, ROWS = 1 << 22, 4  # 16 MiB of fp32: more than the cache of a core
LEAST, WINDOW = 3, 0.1  # the least number of repetitions, and the least seconds of them
SIDE, PRODUCTS = 192, 16  # of matrices that fit in the cache; products long enough to be timed

Work = Callable[[], object]
Meet = Callable[[], object]
"""A function that waits for all ranks."""


def now(device: torch.device) -> float:
    """Return the time in seconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(work: Work, device: torch.device, meet: Meet) -> float:
    """Return the seconds of `work()` with all ranks at it: the mean over a window. Collective."""
    return watched(work, device, meet)[0]


def watched(work: Work, device: torch.device, meet: Meet) -> tuple[float, float]:
    """Return the seconds of `work()` as `timed` does, and the seconds for which this thread had a core."""
    work()
    meet()
    cpu, began, times = time.thread_time(), now(device), 0
    while times < LEAST or now(device) - began < WINDOW:
        work()
        times += 1
    return (now(device) - began) / times, (time.thread_time() - cpu) / times


def copy_seconds(device: torch.device, meet: Meet) -> float:
    """Return the seconds to copy a byte: one read and one write."""
    x = torch.ones(VALUES, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    return timed(lambda: y.copy_(x), device, meet) / x.nbytes


def launch_seconds(device: torch.device, meet: Meet) -> float:
    """Return the seconds to put work on a lane and to get its result."""
    with closing(lane(device, "baguakit probe")) as beside:
        return timed(lambda: beside.run(lambda: None).result(), device, meet)


def codec(compressor: Compressor, device: torch.device, meet: Meet) -> Codec:
    """Return the speed of a compressor, after a warm-up."""
    rows = ROWS if compressor.dense else 1
    x = torch.randn(rows, VALUES // rows, dtype=torch.float32, device=device)
    n = x.shape[1]
    compressor.warm_up(device, x.dtype, x.numel())
    packed, out = compressor.compress(x), torch.empty_like(x)
    total = torch.zeros(n, dtype=torch.float32, device=device)

    def average() -> Tensor:
        return compressor.reduce(packed, n) if compressor.dense else compressor.add_(total, packed, [1.0])

    works: Sequence[Work] = (lambda: compressor.compress(x), lambda: compressor.decompress(packed, n, out=out), average)
    return Codec(repr(compressor), *(timed(work, device, meet) / x.numel() for work in works))


def crowding(device: torch.device, meet: Meet) -> tuple[float, float]:
    """Return κ = T₂/T₁ − 1, from 0 to 1, and the seconds that pass in a second of processor time.

    T₁ is the time of matrix products on all ranks at once, T₂ their time while each rank computes as many on its lane.
    """
    x = torch.randn(SIDE, SIDE, dtype=torch.float32, device=device)

    def products() -> None:
        for _ in range(PRODUCTS):
            x @ x

    with closing(lane(device, "baguakit probe")) as beside:

        def both() -> None:
            flight = beside.run(products)
            products()
            flight.result()

        one, had = watched(products, device, meet)
        two = timed(both, device, meet)
    return min(1.0, max(0.0, two / one - 1)), max(1.0, one / max(1e-9, had))
