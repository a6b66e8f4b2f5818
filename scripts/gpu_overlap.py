"""The effect of the priority of a lane's stream: seconds of steps and of the flights of buckets, beside DDP.

Ranks share a GPU, and train a stack of linear layers. Of each way: seconds until the host has launched a step, seconds
until it is done, and of the flights of a bucket on the device the mean milliseconds from the launch to the begin, on
the lane, and for which training waited. Priorities take turns, so that a GPU that slows down is not taken for one.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, STEPS, ROUNDS = 2048, 5, 3
WAYS = ("ddp", "bytegrad 0", "bytegrad -1", "error feedback 0", "error feedback -1")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("facts", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--megabytes", type=float, default=350.0, help="of gradients")
    parser.add_argument("--cpu", action="store_true", help="over gloo, where priorities mean nothing")
    asked = parser.parse_args(words)
    from baguakit.ranks import Ranks

    layers = max(1, round(asked.megabytes * 2**20 / (4 * WIDTH * WIDTH)))
    facts: dict[str, Any] = {"megabytes": layers * WIDTH * WIDTH * 4 / 2**20}
    with Ranks(2, cuda=not asked.cpu, timeout=60) as ranks:
        for turn in range(1 if asked.cpu else ROUNDS):
            for way in WAYS:
                found = ranks.run(timed, way, layers, not asked.cpu, limit=300.0 if asked.cpu else 40.0)[0]
                facts[f"{way}, round {turn}"] = found
                asked.facts.write_text(json.dumps(facts))
                print(way, turn, json.dumps(found), flush=True)
    return 0


def timed(way: str, layers: int, cuda: bool) -> dict[str, float]:
    """Train in one way on this rank, and return its figures."""
    import torch

    import baguakit as bk
    from baguakit.lanes import cuda as lanes

    device = "cuda" if cuda else "cpu"
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(device)
    x = torch.randn(256 if cuda else 4, WIDTH, device=device)
    if way == "ddp":
        return steps(torch.nn.parallel.DistributedDataParallel(model), x)
    name, priority = way.rsplit(" ", 1)
    before, lanes.PRIORITY = lanes.PRIORITY, int(priority)
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with bk.attach(model, optimizer, bk.algorithms.bytegrad(error_feedback=name != "bytegrad")) as att:
            facts = steps(model, x, optimizer)
            return facts | flights(att)
    finally:
        lanes.PRIORITY = before


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
    from baguakit.lanes.moments import between

    found = []
    for records in att._engine.runners[0].records:
        for record in list(records)[-STEPS:]:
            times = record.flight.times()
            found.append((between(times.launched, times.begun), *record.flight.seconds()))
    names = ("ms before the begin", "ms on the lane", "ms waited for")
    return {name: 1000 * sum(each) / len(found) for name, each in zip(names, zip(*found, strict=True), strict=True)}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import gpu_overlap  # without cloudpickle, ranks find a function by the name of its module

    sys.exit(gpu_overlap.main())
