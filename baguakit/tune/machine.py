"""How fast this rank's own machine is: copies, compressors, lanes, and what a second thread costs the first."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..compressors import Compressor
from ..lanes import lane
from .network import Codec

VALUES, ROWS = 1 << 20, 4  # 4 MiB of fp32: more than stays in a cache that ranks share
REPEATS, LAUNCHES = 5, 50
SIDE, PRODUCTS = 192, 16  # matrices that stay in cache, multiplied often enough to be timed

Work = Callable[[], object]


def now(device: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(work: Work, device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds that `work()` takes: the median of `repeats`, after one that is not counted."""
    work()
    taken = []
    for _ in range(repeats):
        began = now(device)
        work()
        taken.append(now(device) - began)
    return statistics.median(taken)


def copy_seconds(device: torch.device) -> float:
    """Seconds that copying a byte takes: it is read once and written once."""
    x = torch.ones(VALUES, device=device)
    y = torch.empty_like(x)
    return timed(lambda: y.copy_(x), device) / x.nbytes


def launch_seconds(device: torch.device) -> float:
    """Seconds to put work on a lane and to have it back."""
    beside = lane(device, "baguakit probe")
    try:
        return timed(lambda: beside.run(lambda: None).result(), device, LAUNCHES)
    finally:
        beside.close()


def codec(compressor: Compressor, device: torch.device) -> Codec:
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
    return Codec(repr(compressor), *(timed(work, device) / x.numel() for work in works))


def crowding(device: torch.device, meet: Callable[[], object]) -> tuple[float, float]:
    """κ = T₂/T₁ − 1, from 0 to 1, and how many seconds pass in a second of a processor's time.

    T₁ is how long products of matrices take with every rank at them, T₂ how long if each does as many on its lane
    meanwhile. `meet` waits for all ranks.
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
        meet()
        before = time.thread_time()
        began = now(device)
        one = timed(products, device)
        stretch = (now(device) - began) / max(1e-9, time.thread_time() - before)
        meet()
        two = timed(both, device)
    finally:
        beside.close()
    return min(1.0, max(0.0, two / one - 1)), max(1.0, stretch)
