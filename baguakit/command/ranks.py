"""The ranks of a subcommand: processes that it starts itself, or that torchrun has started."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..comm import Comm
from ..ranks import Ranks


@dataclass(frozen=True)
class Crew:
    """All ranks, as the program sees them.

    Attributes:
        size: their number.
        run: calls `function(kept, *args)` on every rank, where `kept` is a dict that lasts, and returns the results.
    """

    size: int
    run: Callable[..., list[Any]]


@contextlib.contextmanager
def crew(size: int) -> Iterator[Crew]:
    """Yield `size` ranks that live as long as the block; under torchrun all of its ranks, whatever `size` is."""
    if launched():
        with joined() as comm:
            kept: dict[str, Any] = {}
            yield Crew(comm.size, lambda call, *args: comm.gather_objects(call(kept, *args)))
    else:
        with Ranks(size) as ranks:
            yield Crew(size, partial(ranks.run, keep=True))


def launched() -> bool:
    """Return whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leads() -> bool:
    """Return whether this process prints: it is rank 0 of torchrun, or torchrun did not start it."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def joined() -> Iterator[Comm]:
    """Join the ranks of torchrun for a block, over NCCL if each has a GPU, else over gloo; yield them, with nodes.

    An interrupt ends this process at once: it may wait inside torch, where handlers in Python do not run.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpu = torch.cuda.device_count() >= local and dist.is_nccl_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo", device_id=device if gpu else None)
    try:
        comm = Comm()
        nodes = comm.gather_objects(local)
        if 1 < local < comm.size and set(nodes) == {local} and comm.size % local == 0:
            shape = (comm.size // local, local)
            comm = Comm(mesh=init_device_mesh(device.type, shape, mesh_dim_names=("inter", "intra")))
        yield comm
        dist.barrier()  # rank 0 holds the store that the others use
    finally:
        dist.destroy_process_group()
