"""A process that trains until it is killed, and says what it does: forked from one that has imported the packages."""

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
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
    """Train until killed; `say` is the end of a pipe that takes tuples: a word, the time, and what belongs to it."""
    say.send(("begins", time.time()))
    enter(namespace)
    os.environ.update(environment)
    torch.set_num_threads(1)
    model, teacher = network(), Teacher()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    patience = {} if cell["timeout"] is None else {"timeout": cell["timeout"]}
    comm = bk.elastic.join(endpoint, least=cell["least"], keep_alive=cell["keep_alive"])
    say.send(("joined", time.time()))
    changed: list[bk.elastic.Change] = []
    with bk.attach(model, optimizer, algorithm(cell["algorithm"]), comm=comm, **patience) as att:
        att.on_regroup(changed.append)
        att.on_regroup(lambda _: say.send(("change", time.time(), att.step, digest(flat(model)))))
        while True:
            before, until = att.step, time.monotonic() + (cell["slept"][cell["host"]] if "slept" in cell else 0.0)
            with att.recoverable():
                step(model, optimizer, teacher, seed=before << 16 | os.getpid())
            time.sleep(max(0.0, until - time.monotonic()))
            if att.step > before:
                if att._life.free:
                    say.send(("waiting", time.time(), att._life.free.paces[0].steps))
                say.send(("step", time.time(), att.step, att.ranks))
            if say.poll():
                say.recv()
                say.send(("weights", time.time(), flat(model).numpy()))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, teacher: Teacher, seed: int) -> None:
    """Make one step on examples of its own."""
    optimizer.zero_grad()
    x, y = teacher.examples(BATCH, seed)
    cross_entropy(model(x), y).backward()
    optimizer.step()


def flat(model: nn.Module) -> Tensor:
    """Return the weights, one after another."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def digest(weights: Tensor) -> str:
    """Return a digest of the bits of weights."""
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
