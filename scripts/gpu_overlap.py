"""The effect of the priority of a lane's stream, and of a second lane: seconds of steps and flights, beside DDP.

Ranks share a GPU, and train a stack of linear layers: two of them, and as two nodes of two with one lane and with two.
Of each way: seconds until the host has launched a step, seconds until it is done, and of the flights of a bucket on the
device the mean milliseconds from the launch to the begin, on the lanes, and for which training waited. Ways take turns,
so that a GPU that slows down is not taken for one.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

WIDTH, STEPS, ROUNDS = 2048, 5, 3
PRIORITIES = ("ddp", "bytegrad 0", "bytegrad -1", "error feedback 0", "error feedback -1")
LANES = ("hierarchical, one lane", "hierarchical, two lanes")
WAYS = {2: PRIORITIES, 4: LANES}  # by the number of ranks


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--megabytes", type=float, default=350.0, help="of gradients")
    parser.add_argument("--cpu", action="store_true", help="over gloo, where priorities mean nothing")
    asked = parser.parse_args(words)
    from baguakit.ranks import Ranks

    layers = max(1, round(asked.megabytes * 2**20 / (4 * WIDTH * WIDTH)))
    facts: dict[str, Any] = {"megabytes": layers * WIDTH * WIDTH * 4 / 2**20}
    for size, ways in WAYS.items():
        with Ranks(size, cuda=not asked.cpu, timeout=60) as ranks:
            for turn in range(1 if asked.cpu else ROUNDS):
                for way in ways:
                    found = ranks.run(timed, way, layers, not asked.cpu, limit=300.0 if asked.cpu else 40.0)[0]
                    facts[f"{way}, round {turn}"] = found
                    asked.facts.write_text(json.dumps(facts))
                    print(way, turn, json.dumps(found), flush=True)
    return 0


def timed(way: str, layers: int, cuda: bool) -> dict[str, float]:
    """Train in one way on this rank, and return its figures."""
    import torch

    import baguakit as bk

    device = "cuda" if cuda else "cpu"
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(device)
    x = torch.randn(256 if cuda else 4, WIDTH, device=device)
    if way == "ddp":
        return steps(torch.nn.parallel.DistributedDataParallel(model), x)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    algorithm, comm = bk.algorithms.bytegrad(error_feedback="feedback" in way), None
    if way in LANES:
        nodes = torch.distributed.device_mesh.init_device_mesh(device, (2, 2), mesh_dim_names=("inter", "intra"))
        algorithm, comm = bk.hierarchical(algorithm), bk.Comm(mesh=nodes)
    with flown(way), bk.attach(model, optimizer, algorithm, comm=comm) as att:
        return steps(model, x, optimizer) | flights(att)


@contextlib.contextmanager
def flown(way: str) -> Iterator[None]:
    """Let lanes have the priority of a way, or flights in phases one lane."""
    from baguakit.lanes import CpuLane, CudaLane, cuda

    priority, runs = cuda.PRIORITY, {kind: kind.run for kind in (CpuLane, CudaLane)}
    if way == LANES[0]:
        for kind, run in runs.items():
            kind.run = lambda lane, work, name="", in_phases=False, run=run: run(lane, work, name)
    elif way not in LANES:
        cuda.PRIORITY = int(way.split()[-1])
    try:
        yield
    finally:
        cuda.PRIORITY = priority
        for kind, run in runs.items():
            kind.run = run


def steps(model: Any, x: Any, optimizer: Any = None) -> dict[str, float]:
    """Return seconds of a step: until the host has launched it, and until it is done."""
    import torch

    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-3)
    for count in (2, STEPS):
        if x.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        launched = time.perf_counter()
        if x.is_cuda:
            torch.cuda.synchronize()
    return {"host seconds": (launched - began) / STEPS, "seconds": (time.perf_counter() - began) / STEPS}


def flights(att: Any) -> dict[str, float]:
    """Return the means of the latest flights of each bucket, in ms."""
    from baguakit.lanes.base import between

    found = []
    for ledger in att._life.runners[0].ledgers:
        for record in list(ledger.flights)[-STEPS:]:
            flight = record.flight
            found.append((between(flight.launched, flight.phases[0][0]), *flight.seconds()))
    names = ("ms before the begin", "ms on the lanes", "ms waited for")
    return {name: 1000 * sum(each) / len(found) for name, each in zip(names, zip(*found, strict=True), strict=True)}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import gpu_overlap  # without cloudpickle, ranks find a function by the name of its module

    sys.exit(gpu_overlap.main())
