"""The ranks of a subcommand: processes that it starts itself, or that torchrun has started."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..comm import Comm
from ..ranks import Ranks


@contextlib.contextmanager
def crew(size: int) -> Iterator[tuple[int, Callable[..., list[Any]]]]:
    """Yield the number of ranks (`size` without torchrun), and a function that calls one on each: results by rank."""
    if launched():
        with joined() as comm:
            yield comm.size, lambda call, *args: comm.gather_objects(call(*args))
    else:
        with Ranks(size) as ranks:
            yield size, ranks.run


def launched() -> bool:
    """Return whether torchrun started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def leads() -> bool:
    """Return whether this process prints: it is rank 0 of torchrun, or torchrun did not start it."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def joined() -> Iterator[Comm]:
    """Yield the `Comm` of the ranks of torchrun for a `with` block: over NCCL if each rank has a GPU, else gloo.

    The `Comm` has a mesh if there are several nodes with several ranks each. Ctrl-C kills the process at once, because
    Python runs no signal handlers while torch waits.
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
