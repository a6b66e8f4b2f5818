"""Profile of a step of bytegrad, on the host and on the device: `python -m bench.step_profile`

Two ranks train a stack of linear layers whose gradients are `--megabytes` in fp32, and rank 0 profiles three steps. It
prints which operations take most time of the device, and which most of the host, and writes a trace for
chrome://tracing. Two ranks on one GPU speak over the loopback, so that waits for messages say nothing of a network:
look at kernels, and at the host.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH = 2048
STEPS = 3
ROWS = 25  # of a table
LIMIT = 55.0  # seconds, on a GPU; on a CPU, where the codec may have to be compiled, ten times as many


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="where step_profile.json.gz goes")
    parser.add_argument("--facts", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--megabytes", type=float, default=350.0, help="of gradients")
    parser.add_argument("--cpu", action="store_true", help="over gloo")
    asked = parser.parse_args(words)
    from baguakit.ranks import Ranks

    layers = max(1, round(asked.megabytes * 2**20 / (4 * WIDTH * WIDTH)))
    asked.out.mkdir(parents=True, exist_ok=True)
    trace = asked.out.resolve() / "step_profile.json.gz"
    with Ranks(2, cuda=not asked.cpu, timeout=60) as ranks:
        facts = ranks.run(profiled, not asked.cpu, layers, WIDTH, str(trace), limit=10 * LIMIT if asked.cpu else LIMIT)[
            0
        ]
    for table in facts.pop("tables"):
        print(table)
    print(json.dumps(facts, indent=1))
    if asked.facts is not None:
        asked.facts.write_text(json.dumps(facts))
    return 0


def profiled(cuda: bool, layers: int, width: int, trace: str) -> dict[str, Any]:
    """Train on this rank; return seconds of a step and those of the host in it, and on rank 0 the profiler's tables."""
    import time

    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    import baguakit as bk

    device = "cuda" if cuda else "cpu"
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(64, width, device=device)

    def steps() -> tuple[float, float]:
        """Seconds until the host had launched all, and until all was done, a step."""
        began = time.perf_counter()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        launched = time.perf_counter()
        if cuda:
            torch.cuda.synchronize()
        return (launched - began) / STEPS, (time.perf_counter() - began) / STEPS

    with bk.attach(model, optimizer, bk.algorithms.bytegrad()):
        steps()
        host, whole = steps()  # before the profiler slows it
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        with profile(activities=activities) as seen:
            steps()
    facts = {"megabytes": layers * width * width * 4 / 2**20, "host seconds a step": host, "seconds a step": whole}
    if dist.get_rank() != 0:
        return facts
    seen.export_chrome_trace(trace)
    orders = ["self_device_time_total"] * cuda + ["self_cpu_time_total"]
    return facts | {"tables": [seen.key_averages().table(sort_by=by, row_limit=ROWS) for by in orders]}


if __name__ == "__main__":
    from bench import step_profile  # without cloudpickle, ranks find a function by the name of its module

    sys.exit(step_profile.main())
