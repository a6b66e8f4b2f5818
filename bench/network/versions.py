"""Weights that changed, beside a broadcast of all: `python -m bench.network versions`.

    3% changed       a publisher on the first host, subscribers on the others: encode, send, check, apply
    broadcast        all values, over gloo

A share of the values of a bf16 tensor moves to a neighbour, as in a step of fine-tuning. A time is from the moment the
first rank begins to the moment the last has the new values, whose digests must be equal. The line of either is what the
first host must send once: the packed bytes, and all bytes.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import baguakit as bk
from baguakit.hashing import digest

from .exchanges import Task, turns
from .train import on_every_host

RATES, HOSTS, MIB, SHARES, REPEATS = ("100mbit", "500mbit"), 4, 256, (0.01, 0.03), 3


def cells(quick: bool) -> list[dict[str, Any]]:
    """Return the cases to measure; quick: 16 MiB."""
    rest = {"mib": 16 if quick else MIB, "repeats": REPEATS}
    return [{"hosts": HOSTS, "rate": rate, "share": share, **rest} for rate in RATES for share in SHARES]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """Both, in turns; every rank returns the same result. Collective."""
    comm = bk.Comm()
    x = torch.randn(cell["mib"] << 19, generator=torch.Generator().manual_seed(0)).bfloat16()
    follows, changes = x.clone(), f"{cell['share']:.0%} changed"
    one = (bk.sync.Subscriber if comm.rank else bk.sync.Publisher)({"x": x}, comm)
    pass_on(one)
    tasks = {
        changes: Task(partial(moved, x, cell["share"], comm.rank), lambda x, _: pass_on(one), partial(equal, x)),
        "broadcast": Task(
            partial(moved, follows, cell["share"], comm.rank),
            lambda x, _: comm.broadcast(x.view(torch.uint8)),
            partial(equal, follows),
        ),
    }
    found = turns(comm, cell["repeats"], tasks)
    log = comm.broadcast_object(None if comm.rank else list(map(len, one.place.log.values())))
    sizes = {changes: sum(log[-cell["repeats"] :]) / cell["repeats"], "broadcast": x.nbytes}
    most = {name: {"busiest": size, "formula": size * (1 - 1 / comm.size)} for name, size in sizes.items()}
    return {name: found[name] | most[name] for name in tasks}


def pass_on(one: bk.sync.Publisher | bk.sync.Subscriber) -> None:
    """Publish on the first host, update on the others."""
    one.publish() if isinstance(one, bk.sync.Publisher) else one.update()


def moved(x: Tensor, share: float, rank: int) -> Tensor:
    """Let a share of the values of the first host move up by one representable value."""
    if rank == 0:
        x.view(torch.int16).add_(torch.rand(x.shape) < share)
    return x


def equal(x: Tensor, result: Any, round: int) -> None:
    """Raise unless all ranks have the same values."""
    told: list[bytes | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, digest(x))
    if len(set(told)) > 1:
        raise AssertionError(f"ranks have different values after round {round}: not timed")


if __name__ == "__main__":
    on_every_host(measure)
