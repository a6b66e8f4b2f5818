"""The program of a host in `test_network_failures`: trainings, one after another, each of which prints how it ended.

    python failing_host.py '[{"flows": 1, "timeout": 3.0, "steps": 30, "device": "late"}, …]'

Lines are JSON: {"step": i} when step i begins, and at the end of a training its weights' checksum, or its error, with
the moment at which it was raised, and what threads and descriptors it has left.
"""

import contextlib
import gc
import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import baguakit as bk

sys.path.append(str(Path(__file__).parents[1]))
import late_device

NAP = 0.05  # seconds that a step takes beside what it computes
SETTLE = 20.0  # seconds after which what is still there has been left behind


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if late_device.supported():
        late_device.install()  # before the first backward, when autograd counts the devices
        trained(flows=1, timeout=60.0, steps=1, device=late_device.NAME)  # for which autograd keeps a thread
    trained(flows=1, timeout=60.0, steps=1)  # what is made once has been made
    for training in json.loads(sys.argv[1]):
        say(ready=True)
        before, outcome = held(), {}
        try:
            outcome["weights"] = trained(**training)
        except Exception as error:
            outcome = {"error": f"{type(error).__name__}: {error}", "at": time.monotonic()}
        until = time.monotonic() + SETTLE
        while (left := held() - before) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.05)
        say(**outcome, left=sorted(left))
    os._exit(0)  # what torch does at its end it does over a network that may not be there


def trained(flows: int, timeout: float, steps: int, device: str = "cpu") -> str:
    """The checksum of the weights after some steps on a device."""
    torch.manual_seed(0)
    rank, model = dist.get_rank(), nn.Sequential(nn.Linear(8, 384), nn.Tanh(), nn.Linear(384, 384), nn.Linear(384, 1))
    optimizer = torch.optim.SGD(model.to(device).parameters(), lr=0.01, momentum=0.9, foreach=False)
    comm, data = bk.Comm(flows=flows), torch.Generator().manual_seed(rank)
    with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), comm=comm, timeout=timeout):
        for step in range(steps):
            say(step=step)
            optimizer.zero_grad()
            model(torch.randn(16, 8, generator=data).to(device)).square().mean().backward()
            optimizer.step()
            time.sleep(NAP)
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


def held() -> set[str]:
    """Threads of this process, by name and number, and what its descriptors stand for."""
    found = {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the folder itself is closed by now
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found - {f"/proc/{os.getpid()}/fd"}


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    main()
