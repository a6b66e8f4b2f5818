"""The facts of one rank among n: what `attach` and a step of each algorithm cost it, in counts."""

import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import baguakit as bk
from baguakit.primitives.neighbors import is_mean, links
from baguakit.rules import Algorithm

from .calls import Calls
from .group import Tally, alone

SIZES = (8, 64, 512, 4096, 16384)
ONE_BUCKET = 25 << 20  # bytes: the two matrices, with every algorithm
WIDE, NARROW = 1024, 512  # two matrices of so many values: 1,048,576, a bucket of 4 MiB
PERIOD = 14  # rounds of the longest period here
REPEATS = 16  # of the steps whose calls are counted
a, t = bk.algorithms, bk.topology
ALGORITHMS: Mapping[str, Callable[[], Algorithm]] = {
    "gradient_allreduce()": a.gradient_allreduce,
    "bytegrad()": a.bytegrad,
    "decentralized(OnePeerExponential())": lambda: a.decentralized(t.OnePeerExponential()),
    "decentralized(Ring())": lambda: a.decentralized(t.Ring()),
    "low_precision_decentralized()": a.low_precision_decentralized,
    "choco(OnePeerExact(), gamma=1.0)": lambda: a.choco(t.OnePeerExact(), gamma=1.0),
    "local_sgd(every=2)": lambda: a.local_sgd(every=2),
    "diloco(every=2)": lambda: a.diloco(every=2),
    "async_model_average()": a.async_model_average,
}


def steps_of(name: str) -> int:
    """Return the number of steps to count: a period of a graph that changes, or one exchange of the others."""
    return PERIOD if "OnePeer" in name else 2


def resources() -> dict[str, float]:
    """Return the resident memory in MiB, and the threads and descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MiB": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def tensor_bytes() -> int:
    """Return the bytes of all dense tensors of this process. Those of other classes (fake ones) may hold none."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    held = [x.untyped_storage() for x in found if x.layout is torch.strided]
    return sum({each.data_ptr(): each.nbytes() for each in held}.values())


def traffic(tally: Tally) -> dict[str, float]:
    """Return the messages, collectives, bytes and requests so far."""
    return {
        "messages": tally.messages,
        "collectives": sum(tally.collectives.values()),
        "bytes": tally.sent,
        "requests": sum(tally.requests.values()),
    }


def facts(name: str, size: int, steps: int | None = None) -> dict[str, Any]:
    """Return the facts of an algorithm on one rank of `size`, counted on this process.

    `attach` has what it did at the start, `step` the mean over some steps after as many others (of calls, the least
    mean of several), `added` the resources in use after these, `tensors` the bytes of all tensors that are kept,
    and `peers` the number of ranks that messages came from or went to.
    """
    for cached in (links, is_mean):  # from an earlier attachment
        cached.cache_clear()
    count = steps_of(name) if steps is None else steps
    layers = (torch.nn.Linear(NARROW, WIDE, bias=False), torch.nn.Linear(WIDE, NARROW, bias=False))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(2, NARROW)

    attached: list[bk.Attachment] = []

    def train() -> None:
        for _ in range(count):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        land()

    def attach() -> None:
        attached.append(bk.attach(model, optimizer, algorithm, comm=comm, bucket_bytes=ONE_BUCKET))
        land()

    def land() -> None:
        """Wait for the flights launched so far: they are counted with these steps, and no others are."""
        for each in attached:
            for channel in each._life.runtime.channels:
                channel.lane.run(lambda: None).result()

    train()
    calls = Calls()
    plain = calls_of(calls, train) / count
    before, tensors = resources(), tensor_bytes()
    with alone(size) as (comm, tally), calls.installed():
        algorithm = ALGORITHMS[name]()
        at_start = calls.of(attach)
        start = traffic(tally)
        with attached[0]:
            train()
            warm = traffic(tally)
            of_steps = calls.of(train)
            done, after, held = traffic(tally), resources(), tensor_bytes()
            # A wait for a flight that has landed already makes fewer calls, and a busy machine is not always so quick.
            if steps is None:  # a whole period, so that the next one is alike
                of_steps = min(of_steps, *(calls.of(train) for _ in range(REPEATS)))
            assert all(bool(p.isfinite().all()) for p in model.parameters())
    return {
        "algorithm": name,
        "ranks": size,
        "attach": {"calls": at_start, **start},
        "step": {"calls": of_steps / count - plain, **{k: (done[k] - warm[k]) / count for k in done}},
        "added": {k: after[k] - before[k] for k in after},
        "tensors": held - tensors,
        "peers": len(tally.peers),
    }


def calls_of(calls: Calls, work: Callable[[], Any]) -> int:
    """Return the Python calls of `work()` without anything attached."""
    with calls.installed():
        return calls.of(work)


def measured(name: str, size: int) -> dict[str, Any]:
    """Return the facts, counted on a process of its own."""
    with bk.Ranks(1) as ranks:
        return ranks.run(facts, name, size)[0]
