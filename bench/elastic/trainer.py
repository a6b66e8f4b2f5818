"""A process that trains until it is killed, and says what it does: forked from one that has imported the packages."""

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import baguakit as bk
from baguakit.compare.names import algorithm
from baguakit.store.__main__ import main as serve
from bench.netlab import enter

from .task import BATCH, LR, MOMENTUM, Teacher, network

torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # the first optimizer of a process imports for seconds


def keep_store(namespace: Path, address: str) -> None:
    """Be the store, on a host that does not train."""
    enter(namespace)
    serve(["--bind", address])


def train(say: Any, namespace: Path, environment: Mapping[str, str], endpoint: str, cell: Mapping[str, Any]) -> None:
    """Train until killed; `say` is the end of a pipe that takes tuples: a word, the time, and what belongs to it.

    It gives "weights", which are answered, or the seconds that a step sleeps before its backward from now on. With
    "sample" in the cell, weights are also kept in the cell's folder, after the first step in each such time.
    """
    say.send(("begins", time.time()))
    enter(namespace)
    os.environ.update(environment)
    torch.set_num_threads(1)
    model, teacher = network(), Teacher()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    patience = {} if cell["timeout"] is None else {"timeout": cell["timeout"]}
    elastic = cell.get("elastic", True)
    patient = {name: cell[name] for name in ("least", "keep_alive")}
    comm = bk.elastic.join(endpoint, **patient) if elastic else meet(endpoint, cell)
    say.send(("joined", time.time()))
    changed: list[bk.elastic.Change] = []
    with bk.attach(model, optimizer, algorithm(cell["algorithm"]), comm=comm, **patience) as att:
        if elastic:
            att.on_regroup(changed.append)
            att.on_regroup(lambda _: say.send(("change", time.time(), att.step, digest(flat(model)))))
        computing, every = cell.get("computing", 0.0), cell.get("sample", math.inf)
        sample = time.time() // every
        while True:
            began = time.monotonic()
            before, until = att.step, began + (cell["slept"][cell["host"]] if "slept" in cell else 0.0)
            with att.recoverable() if elastic else contextlib.nullcontext():
                step(model, optimizer, teacher, seed=before << 16 | os.getpid(), until=began + computing)
            time.sleep(max(0.0, until - time.monotonic()))
            if att.step > before:
                if att._life.free:
                    say.send(("waiting", time.time(), att._life.free.paces[0].steps))
                say.send(("step", time.time(), att.step, att.ranks))
            else:
                say.send(("discarded", time.time()))
            asked = say.recv() if say.poll() else None
            computing = asked if isinstance(asked, float) else computing
            if asked == "weights":
                say.send(("weights", time.time(), flat(model).numpy()))
            if sample < time.time() // every:
                sample = time.time() // every
                path = Path(cell["folder"], f"{cell['host']}-{sample:.0f}.pt")
                torch.save(flat(model), path)  # a pipe would fill, and let this process wait
                say.send(("sample", time.time(), path))


def meet(endpoint: str, cell: Mapping[str, Any]) -> bk.Comm:
    """Return a group that does not change, of all hosts."""
    host, _, port = endpoint.partition(":")
    store = dist.TCPStore(host, int(port), is_master=False)
    dist.init_process_group("gloo", store=store, rank=cell["host"], world_size=cell["hosts"])
    return bk.Comm()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, teacher: Teacher, seed: int, until: float = 0.0) -> None:
    """Make one step on examples of its own; sleep before the backward until a moment of `time.monotonic`."""
    optimizer.zero_grad()
    x, y = teacher.examples(BATCH, seed)
    loss = cross_entropy(model(x), y)
    time.sleep(max(0.0, until - time.monotonic()))
    loss.backward()
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    """Return the weights, one after another."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def digest(weights: Tensor) -> str:
    """Return a digest of the bits of weights."""
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
