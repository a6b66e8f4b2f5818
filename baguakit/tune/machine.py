"""How fast this rank's own machine is: copies, compressors, lanes, and what a second thread costs the first.

Ranks of one machine share its cores and its memory, and in training they are at the same work at the same time. So all
begin together and repeat a work for as long as it takes that each has had its turns on the cores; what counts is the
mean. A median of single works would be that of those during which nobody else had a turn.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..compressors import Compressor
from ..lanes import lane
from .network import Codec

VALUES, ROWS = 1 << 22, 4  # 16 MiB of fp32: more than a core keeps to itself
LEAST, WINDOW = 3, 0.1  # how often a work is repeated at least, and for how many seconds
SIDE, PRODUCTS = 192, 16  # matrices that stay in cache, multiplied often enough to be timed

Work = Callable[[], object]
Meet = Callable[[], object]
"""Waits for all ranks."""


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(work: Work, device: torch.device, meet: Meet) -> float:
    """Seconds that `work()` takes with all ranks at it: the mean over a window. Collective."""
    return watched(work, device, meet)[0]


def watched(work: Work, device: torch.device, meet: Meet) -> tuple[float, float]:
    """`timed`, and the seconds of those for which this thread had a core."""
    work()
    meet()
    cpu, began, times = time.thread_time(), now(device), 0
    while times < LEAST or now(device) - began < WINDOW:
        work()
        times += 1
    return (now(device) - began) / times, (time.thread_time() - cpu) / times


def copy_seconds(device: torch.device, meet: Meet) -> float:
    """Seconds that copying a byte takes: it is read once and written once."""
    x = torch.ones(VALUES, device=device)
    y = torch.empty_like(x)
    return timed(lambda: y.copy_(x), device, meet) / x.nbytes


def launch_seconds(device: torch.device, meet: Meet) -> float:
    """Seconds to put work on a lane and to have it back."""
    beside = lane(device, "baguakit probe")
    try:
        return timed(lambda: beside.run(lambda: None).result(), device, meet)
    finally:
        beside.close()


def codec(compressor: Compressor, device: torch.device, meet: Meet) -> Codec:
    """How fast a compressor is; it is warmed up first."""
    rows = ROWS if compressor.dense else 1
    x = torch.randn(rows, VALUES // rows, device=device)
    n = x.shape[1]
    compressor.warm_up(device, x.dtype, x.numel())
    packed, out = compressor.compress(x), torch.empty_like(x)
    total = torch.zeros(n, device=device)

    def average() -> Tensor:
        return compressor.reduce(packed, n) if compressor.dense else compressor.add_(total, packed, [1.0])

    works: Sequence[Work] = (
        lambda: compressor.compress(x),
        lambda: compressor.decompress(packed, n, out=out),
        average,
    )
    return Codec(repr(compressor), *(timed(work, device, meet) / x.numel() for work in works))


def crowding(device: torch.device, meet: Meet) -> tuple[float, float]:
    """κ = T₂/T₁ − 1, from 0 to 1, and how many seconds pass in a second of a processor's time.

    T₁ is how long products of matrices take with every rank at them, T₂ how long if each does as many on its lane
    meanwhile.
    """
    x = torch.randn(SIDE, SIDE, device=device)
    beside = lane(device, "baguakit probe")

    def products() -> None:
        for _ in range(PRODUCTS):
            x @ x

    def both() -> None:
        flight = beside.run(products)
        products()
        flight.result()

    try:
        one, had = watched(products, device, meet)
        two = timed(both, device, meet)
    finally:
        beside.close()
    return min(1.0, max(0.0, two / one - 1)), max(1.0, one / max(1e-9, had))
