"""Many real ranks on this machine: what starting them and attaching takes each of them."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import baguakit as bk

from .measures import ALGORITHMS, NARROW, WIDE

SIZES = (2, 4, 8, 16, 32, 64)
NAMES = ("gradient_allreduce()", "bytegrad()", "decentralized(OnePeerExponential())")
REPEATS = 3


def private_mib() -> float:
    """Return the memory that only this process uses, in MiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private")) / 1024


def attached(name: str) -> dict[str, float]:
    """Attach on this rank, and make two steps; return the seconds of attach, and what it has added."""
    model = torch.nn.Sequential(torch.nn.Linear(NARROW, WIDE, bias=False), torch.nn.Linear(WIDE, NARROW, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.ones(2, NARROW)

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    train()
    memory, files = private_mib(), len(os.listdir("/proc/self/fd"))
    torch.distributed.barrier()
    began = time.perf_counter()
    with bk.attach(model, optimizer, ALGORITHMS[name]()):
        seconds = time.perf_counter() - began
        at_attach = len(os.listdir("/proc/self/fd")) - files
        train()
        return {
            "seconds": seconds,
            "MiB": private_mib() - memory,
            "of process": private_mib(),
            "descriptors at attach": at_attach,
            "descriptors": len(os.listdir("/proc/self/fd")) - files,
        }


def measured(size: int) -> list[dict[str, Any]]:
    """Return a row for each algorithm, on ranks of its own: others would count what the last attachment left open."""
    return [of_algorithm(name, size) for name in NAMES]


def of_algorithm(name: str, size: int) -> dict[str, Any]:
    """Return the row of an algorithm: of the slowest rank, and of those that do not hold the store."""
    began = time.perf_counter()
    with bk.Ranks(size) as ranks:
        ranks.run(os.getpid)
        started = time.perf_counter() - began
        return row(name, size, started, [ranks.run(attached, name) for _ in range(REPEATS)])


def row(name: str, size: int, started: float, runs: Sequence[Sequence[dict[str, float]]]) -> dict[str, Any]:
    """Return the facts of some runs."""
    found: dict[str, Any] = {"algorithm": name, "ranks": size, "started": started}
    found["seconds"] = median(max(each["seconds"] for each in run) for run in runs)
    for fact in ("MiB", "of process", "descriptors at attach", "descriptors"):
        found[fact] = max(each[fact] for each in runs[0][1:])  # the first: later ones find memory that is warm
    return found
