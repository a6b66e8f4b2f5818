"""Compressed collectives alone, against their ideal lines: `python -m bench.network collectives`.

    collective              bytes sent by a rank, of n and a tensor of N values         the busiest link carries
    all_gather              (n − 1) c(N/n), N being the values of the result            the same
    reduce_scatter          (n − 1) c(N/n)                                              the same
    all_to_all              (n − 1) c(N/n)                                              the same
    all_to_all, unequal     c(N/2) + c(N/3), and N/6 stay: to the two next ranks        the same
    broadcast               (n − 1)/n c(N), the mean over ranks                         c(N)
    send                    c(N)/2: even ranks send to the next                         c(N)

c(N) is the bytes of N values in 8 bits, with their ranges. The ideal time is that of the busiest link. Results are
written to tensors that exist, as by torch's own collectives. Each is checked before its time counts. Two hosts have a
core each on a machine of two; four share them, and so wait for each other's codecs.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import baguakit as bk

from .exchanges import BYTE, Task, turns
from .train import on_every_host

RATES, HOSTS, SIZES, REPEATS = ("100mbit", "500mbit"), (2, 4), (16, 64), 9
ROWS = 24  # of a tensor of N values: they are divisible by 6 and by the hosts
Sizes = Callable[[int, int], float]


@dataclass(frozen=True)
class Collective:
    """A primitive on what a rank gives, and what it must return and send.

    Attributes:
        gives: of the rows of all values, what this rank gives: from (rows, rank, n).
        call: from (what it gives, comm, a tensor for the result).
        expected: its result, from (rows, rank, n).
        sends: bytes that a rank sends, the mean over ranks, from (values, n).
        busiest: bytes that the busiest link carries; None for the same.
        terms: values that are added up in a result, as are their errors: from n.
    """

    gives: Callable[[Tensor, int, int], Tensor]
    call: Callable[[Tensor, bk.Comm, Tensor], Tensor | None]
    expected: Callable[[Tensor, int, int], Tensor]
    sends: Sizes
    busiest: Sizes | None = None
    terms: Callable[[int], int] = lambda n: 1


def shards(values: int, n: int) -> float:
    """A shard to each other rank."""
    return (n - 1) * BYTE.row_bytes(values // n)


def unequal(values: int, n: int) -> float:
    """Half to the next rank, a third to the one after it; of two ranks that is the rank itself."""
    return BYTE.row_bytes(values // 2) + (BYTE.row_bytes(values // 3) if n > 2 else 0)


def whole(values: int, n: int) -> float:
    """All values."""
    return BYTE.row_bytes(values)


def rows_to(rank: int, n: int) -> list[int]:
    """Of ROWS rows of a rank, those to each: a sixth to itself, half to the next, a third to the one after it."""
    parts = [0] * n
    for step, part in enumerate((ROWS // 6, ROWS // 2, ROWS // 3)):
        parts[(rank + step) % n] += part
    return parts


def between(x: Tensor, comm: bk.Comm, out: Tensor) -> Tensor | None:
    """Send from an even rank to the next."""
    if comm.rank % 2:
        return bk.primitives.compressed_receive_(out, BYTE, comm, comm.rank - 1)
    bk.primitives.compressed_send(x, BYTE, comm, comm.rank + 1)
    return None


def unevenly(x: Tensor, comm: bk.Comm, out: Tensor) -> Tensor:
    """Send to each rank its rows."""
    coming = [rows_to(peer, comm.size)[comm.rank] for peer in range(comm.size)]
    return bk.primitives.compressed_all_to_all(x, BYTE, comm, coming, rows_to(comm.rank, comm.size), out)


def heard(rows: Tensor, rank: int, n: int) -> Tensor:
    """The rows that come to a rank by `rows_to`, in the order of the ranks."""
    parts = [rows.split(rows_to(peer, n))[rank] + peer for peer in range(n)]
    return torch.cat(parts)


COLLECTIVES = {
    "all_gather": Collective(
        lambda rows, rank, n: rows.chunk(n)[rank] + rank,
        lambda x, comm, out: bk.primitives.compressed_all_gather(x, BYTE, comm, out),
        lambda rows, rank, n: torch.cat([chunk + peer for peer, chunk in enumerate(rows.chunk(n))]),
        shards,
    ),
    "reduce_scatter": Collective(
        lambda rows, rank, n: rows + rank,
        lambda x, comm, out: bk.primitives.compressed_reduce_scatter(x, BYTE, comm, out=out),
        lambda rows, rank, n: rows.chunk(n)[rank] * n + n * (n - 1) / 2,
        shards,
        terms=lambda n: n,
    ),
    "all_to_all": Collective(
        lambda rows, rank, n: rows + rank,
        lambda x, comm, out: bk.primitives.compressed_all_to_all(x, BYTE, comm, out=out),
        lambda rows, rank, n: torch.cat([rows.chunk(n)[rank] + peer for peer in range(n)]),
        shards,
    ),
    "all_to_all, unequal": Collective(lambda rows, rank, n: rows + rank, unevenly, heard, unequal),
    "broadcast": Collective(
        lambda rows, rank, n: rows + rank,
        lambda x, comm, out: bk.primitives.compressed_broadcast_(x, BYTE, comm, source=1),
        lambda rows, rank, n: rows + 1,
        lambda values, n: (n - 1) / n * whole(values, n),
        whole,
    ),
    "send": Collective(
        lambda rows, rank, n: rows + rank,
        between,
        lambda rows, rank, n: rows + rank - 1,
        lambda values, n: whole(values, n) / 2,
        whole,
    ),
}


def cells(quick: bool) -> list[dict[str, Any]]:
    """Return the cases to measure; quick: 16 MiB."""
    return [
        {"hosts": hosts, "rate": rate, "mib": mib, "repeats": REPEATS}
        for hosts, rate, mib in itertools.product(HOSTS, RATES, SIZES[: 1 if quick else None])
    ]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """All collectives of one size, in turns; every rank returns the same result. Collective."""
    comm, values = bk.Comm(), cell["mib"] << 18
    values -= values % (ROWS * comm.size)
    rows = torch.randn(values, generator=torch.Generator().manual_seed(0)).view(ROWS, -1)
    BYTE.warm_up("cpu")
    tasks = {name: task(each, rows, comm) for name, each in COLLECTIVES.items()}
    few = rows[:, : (1 << 18) // ROWS].contiguous()
    for each in COLLECTIVES.values():  # connections are made
        each.call(
            each.gives(few, comm.rank, comm.size), comm, torch.zeros_like(each.expected(few, comm.rank, comm.size))
        )
    found = turns(comm, cell["repeats"], tasks)
    return {
        name: found[name]
        | {"formula": each.sends(values, comm.size), "busiest": (each.busiest or each.sends)(values, comm.size)}
        for name, each in COLLECTIVES.items()
    }


def task(each: Collective, rows: Tensor, comm: bk.Comm) -> Task:
    """Return the task of a collective: what it takes, the call, and the check of its result."""
    out = torch.zeros_like(each.expected(rows, comm.rank, comm.size))

    def check(result: Tensor | None, round: int) -> None:
        if result is not None:
            error = float((result - each.expected(rows, comm.rank, comm.size)).abs().max())
            if not error <= 0.05 * each.terms(comm.size):
                raise AssertionError(f"off by {error:g} on rank {comm.rank} of {comm.size}: not timed")

    return Task(
        lambda: each.gives(rows, comm.rank, comm.size).contiguous(),
        lambda x, round: each.call(x, comm.at(round), out),
        check,
    )


if __name__ == "__main__":
    on_every_host(measure)
