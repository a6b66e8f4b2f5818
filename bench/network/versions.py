"""Weights that changed, beside a broadcast of all: `python -m bench.network versions`.

    3% changed       a publisher on the first host, subscribers on the others: pack, send, check, apply
      delivered      the same until the last packed byte is there, and checked, on all hosts; nothing is applied yet
      early          the same by subscribers with `early=True`, until all have applied all
    broadcast        all values, over gloo

A share of the values of a bf16 tensor moves to a neighbour, as in a step of fine-tuning. A time is from the moment the
first rank begins to the moment the last has the new values, whose digests must be equal. The line of either is what the
first host must send once: the packed bytes, and all bytes. Each is repeated by itself, and broadcasts come last: they
take so long that a virtual machine gives memory that is not used back to its own host, and waits to have it again.
Four hosts share the two cores of one machine: what one of them computes alone, while the others wait, is told beside.
Two hosts have a core each.
"""

import statistics
import time
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import baguakit as bk
from baguakit.hashing import digest
from baguakit.sync import versions
from baguakit.sync.streams import taker

from .exchanges import Task, told, turns
from .train import on_every_host

RATES, HOSTS, MIB, SHARES, REPEATS, BROADCASTS = ("100mbit", "500mbit"), (4, 2), 256, (0.01, 0.03), 7, 2
DELIVERED, EARLY = "  delivered", "  early"
Sync = bk.sync.Publisher | bk.sync.Subscriber


def cells(quick: bool) -> list[dict[str, Any]]:
    """Return the cases to measure; quick: 16 MiB."""
    rest = {"mib": 16 if quick else MIB, "repeats": REPEATS}
    return [{"hosts": n, "rate": rate, "share": share, **rest} for n in HOSTS for rate in RATES for share in SHARES]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """All of them; every rank returns the same result. Collective."""
    comm = bk.Comm()
    x = torch.randn(cell["mib"] << 19, generator=torch.Generator().manual_seed(0)).bfloat16()
    follows, changes, found = x.clone(), f"{cell['share']:.0%} changed", {}
    move, same = partial(moved, x, cell["share"], comm.rank), partial(equal, x)
    for name in (EARLY, changes):
        to: dict[str, Any] = {"early": name == EARLY} if comm.rank else {}
        one = (bk.sync.Subscriber if comm.rank else bk.sync.Publisher)({"x": x}, comm, **to)
        marks = [pass_on(one)]
        found |= turns(comm, cell["repeats"], {name: Task(move, partial(follow, one, marks), same)})
    move, same = partial(moved, follows, cell["share"], comm.rank), partial(equal, follows)
    all_ = Task(move, lambda x, _: comm.broadcast(x.view(torch.uint8)), same)
    found |= turns(comm, BROADCASTS, {"broadcast": all_})
    rounds = zip(*comm.gather_objects(marks[1:]), strict=True)
    delivered = [max(checked for _, checked in each) - min(began for began, _ in each) for each in rounds]
    found = {changes: found[changes], DELIVERED: found[changes] | told(delivered)} | found
    log = comm.broadcast_object(None if comm.rank else list(map(len, one.place.log.values())))
    sizes = dict.fromkeys((changes, DELIVERED, EARLY), sum(log[-cell["repeats"] :]) / cell["repeats"])
    for name, size in (sizes | {"broadcast": x.nbytes}).items():
        found[name] |= {"busiest": size, "formula": size * (1 - 1 / comm.size)}
    found[changes]["alone"] = comm.broadcast_object(alone(one, x, cell) if comm.rank == 0 else None)
    return found


def follow(one: Sync, marks: list[tuple[float, float]], x: Tensor, round: int) -> None:
    marks.append(pass_on(one))


def pass_on(one: Sync) -> tuple[float, float]:
    """Publish on the first host, update on the others; return when it began, and when nothing was left but to apply."""
    began, checked = time.perf_counter(), []

    def add_(*arguments: Any) -> Tensor:
        checked.append(time.perf_counter())
        return apply(*arguments)

    apply = versions.add_
    with mock.patch.object(versions, "add_", add_):
        one.publish() if isinstance(one, bk.sync.Publisher) else one.update()
    return began, min(checked, default=time.perf_counter())


def alone(publisher: bk.sync.Publisher, x: Tensor, cell: dict[str, Any]) -> dict[str, float]:
    """Return the medians of the seconds that this host takes to pack, check and apply, while the others wait."""
    seconds: dict[str, list[float]] = {"pack": [], "check": [], "apply": []}
    here, there = {"x": x.clone()}, {"x": x.clone()}
    for _ in range(cell["repeats"]):
        moved(x, cell["share"], 0)
        times = [time.perf_counter()]
        take = taker(list(publisher._packed(0, {"x": x}, here)))
        times.append(time.perf_counter())
        parts = versions.ranges(there["x"])
        packed = [each for _, _, each in versions.parts_of(versions.next_packet(take), take, there)]
        changes = [versions.read(each, part) for each, part in zip(packed, parts, strict=True)]
        times.append(time.perf_counter())
        for part, change in zip(parts, changes, strict=True):
            versions.add_(part, change)
        times.append(time.perf_counter())
        if not torch.equal(there["x"], x):
            raise AssertionError("what was applied is not what was packed: not timed")
        for name, before, after in zip(seconds, times, times[1:], strict=False):
            seconds[name].append(after - before)
    return {name: statistics.median(each) for name, each in seconds.items()}


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
