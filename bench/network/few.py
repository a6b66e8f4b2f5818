"""Latency of a bucket of few values, with a compressed mean and with a plain one: `python -m bench.network few`.

Few values take as long as their hops and calls do, whatever their bytes are. Both means take turns, and every result is
checked. A time is what the slowest rank waits, from a barrier on: its calls come out of cold caches, as they do between
the backward passes of training. What is told is the median, and the quartiles.
"""

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist

import baguakit as bk

from .exchanges import BYTE, EXCHANGES, RATES, check, told
from .train import on_every_host

HOSTS, VALUES, REPEATS = (2, 4), tuple(1 << power for power in range(4, 19, 2)), 100
PLAIN, COMPRESSED = NAMES = ("mean_", "compressed_mean_")


def cells(quick: bool) -> list[dict[str, Any]]:
    """Return the cases to measure; quick: two hosts at one rate."""
    rates, hosts = (("500mbit",), (2,)) if quick else (RATES, HOSTS)
    return [
        {"hosts": n, "rate": rate, "values": list(VALUES), "repeats": REPEATS}
        for rate, n in itertools.product(rates, hosts)
    ]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Both means of each number of values; every rank returns the same result. Collective."""
    comm = bk.Comm()
    BYTE.warm_up("cpu")
    return {str(values): of_values(values, cell["repeats"], comm) for values in cell["values"]}


def of_values(values: int, repeats: int, comm: bk.Comm) -> dict[str, Any]:
    """Both means of so many values, in turns."""
    base = torch.randn(values, generator=torch.Generator().manual_seed(0))
    mine: dict[str, list[float]] = {name: [] for name in NAMES}
    for round, name in itertools.product(range(1 + repeats), NAMES):
        x = base + comm.rank
        dist.barrier()
        began = time.perf_counter()
        EXCHANGES[name].call(x, comm.at(round))
        mine[name].append(time.perf_counter() - began)
        check(name, EXCHANGES[name], x, base, comm.rank, comm.size, round)
    every = comm.gather_objects(mine)
    slowest = {name: list(map(max, *(one[name] for one in every))) for name in NAMES}
    return {name: told(times[1:]) for name, times in slowest.items()}


if __name__ == "__main__":
    on_every_host(measure)
