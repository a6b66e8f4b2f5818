"""torchft's all-reduce as a contender, where it is installed: each rank is a replica group of its own.

Its lighthouse stands where our store does. All gradients travel in one all-reduce, as in ours; a rank that joins takes
weights and optimizer state from a peer, by torchft's own transport. Its `DistributedDataParallel` is not used: when a
rank is lost over gloo, an assertion in its hook ends the others.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from bench.netlab import LINK, enter
from bench.network.hivemind_peer import address_of

from .task import BATCH, LR, MOMENTUM, Teacher, network
from .trainer import digest, flat

NAME = "torchft: all-reduce"
INSTALLED = find_spec("torchft") is not None
PATIENCE = timedelta(seconds=10)
JOIN_MS = 1000  # for which a quorum waits for those that live, as `keep_alive` of ours

if INSTALLED:
    import torchft
    from torchft.checkpointing.http_transport import HTTPTransport
    from torchft.coordination import LighthouseServer


def keep_store(namespace: Path, address: str) -> None:
    """Be the lighthouse, on a host that does not train."""
    enter(namespace)
    lighthouse = LighthouseServer(f"{address}:29400", 1, join_timeout_ms=JOIN_MS)
    threading.Event().wait()
    lighthouse.shutdown()


def train(say: Any, namespace: Path, environment: Mapping[str, str], endpoint: str, cell: Mapping[str, Any]) -> None:
    """Train until killed, and say the same as `trainer.train`."""
    say.send(("begins", time.time()))
    enter(namespace)
    os.environ.update(environment)
    torch.set_num_threads(1)
    model, teacher = network(), Teacher()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    host, params, quorum = address_of(LINK), list(model.parameters()), -1

    def load(state: Mapping[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    transport = HTTPTransport(timeout=PATIENCE, num_chunks=0)
    named = transport.address()  # by the host name of the machine, which other hosts of a laboratory cannot resolve
    transport.address = lambda: named.replace(socket.gethostname(), host, 1)
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        torchft.ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=PATIENCE,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{endpoint}",
        replica_id=f"{host}_{os.getpid()}",
        hostname=host,
        checkpoint_transport=transport,
    )
    say.send(("joined", time.time()))
    while True:
        manager.start_quorum()
        optimizer.zero_grad()
        x, y = teacher.examples(BATCH, manager.current_step() << 16 | os.getpid())
        cross_entropy(model(x), y).backward()
        gradients = nn.utils.parameters_to_vector([p.grad for p in params])
        manager.allreduce(gradients).wait()
        if manager.should_commit():
            if manager._quorum_id != quorum:  # the weights are those before this step
                quorum = manager._quorum_id
                say.send(("change", time.time(), manager.current_step(), digest(flat(model))))
            for p, gradient in zip(params, gradients.split([p.numel() for p in params]), strict=True):
                p.grad = gradient.view_as(p)
            optimizer.step()
            say.send(("step", time.time(), manager.current_step(), manager.num_participants()))
        if say.poll():
            say.recv()
            say.send(("weights", time.time(), flat(model).numpy()))
