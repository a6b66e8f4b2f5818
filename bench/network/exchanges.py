"""Exchanges alone, against their ideal lines: `python -m bench.network exchanges`.

    exchange                    bytes sent by a rank, S the tensor in fp32     ideal time
    mean_                       2 (n − 1)/n · S                                bytes / rate
    compressed_mean_            2 (n − 1)/n · S/4 and ranges                   bytes / rate
      its messages alone        the same, of bytes that nobody computes        what these hosts can do with them
    neighbor_mean_, one peer    S                                              bytes / rate, whatever n is
    neighbor_mean_, ring        2 S (S for two ranks)                          bytes / rate, whatever n is

The result of each is checked before its time counts. A time is from the moment the first rank begins to the moment the
last has its result; what is told is the median, and the quartiles, of several, the exchanges taking turns.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import baguakit as bk
from baguakit.compressors import Compressor, MinMaxUInt8
from baguakit.topology import OnePeerExponential, Ring
from bench.netlab import Counters

from . import formulas
from .train import counted, on_every_host, share

RATES = ("100mbit", "500mbit", "1gbit", "unshaped")
HOSTS, SIZES, REPEATS = (2, 4, 8), (16, 64), 5
BYTE, ONE_PEER, RING = MinMaxUInt8(), OnePeerExponential(), Ring()


@dataclass(frozen=True, repr=False)
class Uncomputed(Compressor):
    """Rows as long as those of MinMaxUInt8, filled and not computed: what they take is what messages take."""

    filling: int = 77

    def row_bytes(self, n: int) -> int:
        return BYTE.row_bytes(n)

    def compress(self, x: Tensor, residual: Tensor | None = None, key: int = 0) -> Tensor:
        return torch.full((x.shape[0], self.row_bytes(x.shape[1])), self.filling, dtype=torch.uint8)

    def reduce(self, packed: Tensor, n: int, residual: Tensor | None = None, key: int = 0) -> Tensor:
        return self._whole(packed)[:1]

    def decompress(
        self, packed: Tensor, n: int, dtype: torch.dtype = torch.float32, out: Tensor | None = None
    ) -> Tensor:
        self._whole(packed)
        return torch.zeros(packed.shape[0], n, dtype=dtype) if out is None else out

    def _whole(self, packed: Tensor) -> Tensor:
        """Rows, once it has been seen that all have arrived: their ends are what was sent."""
        if not bool((packed[:, [0, -1]] == self.filling).all()):
            raise AssertionError("messages have not arrived as they were sent: not timed")
        return packed


@dataclass(frozen=True)
class Exchange:
    """A primitive, as it is called, what it must send for `values` on n ranks, and the error it is allowed.

    Attributes:
        weights: of this rank and others, from (rank, ranks, round): what the result must be.
        tolerance: of the result, in differences of neighbouring ranks' values.
    """

    call: Callable[[Tensor, bk.Comm], Any]
    sends: Callable[[int, int], float]
    weights: Callable[[int, int, int], dict[int, float]]
    tolerance: float = 1e-3


def everyone(rank: int, n: int, round: int) -> dict[int, float]:
    """The weights of the exact mean."""
    return dict.fromkeys(range(n), 1 / n)


def itself(rank: int, n: int, round: int) -> dict[int, float]:
    """The weights of what stays as it is."""
    return {rank: 1.0}


EXCHANGES = {
    "mean_": Exchange(bk.primitives.mean_, lambda v, n: formulas.all_reduce([[v]], n), everyone),
    "compressed_mean_": Exchange(
        lambda x, comm: bk.primitives.compressed_mean_(x, BYTE, comm),
        lambda v, n: formulas.compressed_all_reduce([[v]], n, BYTE),
        everyone,
        tolerance=0.05,
    ),
    "its messages alone": Exchange(
        lambda x, comm: bk.primitives.compressed_mean_(x, Uncomputed(), comm),
        lambda v, n: formulas.compressed_all_reduce([[v]], n, BYTE),
        itself,
    ),
    "neighbor_mean_, one peer": Exchange(
        lambda x, comm: bk.primitives.neighbor_mean_(x, ONE_PEER, comm),
        lambda v, n: formulas.gossip([[v]], n, ONE_PEER),
        ONE_PEER.weights,
    ),
    "neighbor_mean_, ring": Exchange(
        lambda x, comm: bk.primitives.neighbor_mean_(x, RING, comm),
        lambda v, n: formulas.gossip([[v]], n, RING),
        RING.weights,
    ),
}


def cells(quick: bool) -> list[dict[str, Any]]:
    """Return the cases to measure; quick: four hosts, 16 MiB, two rates."""
    rates, hosts, sizes = (("100mbit", "500mbit"), (4,), (16,)) if quick else (RATES, HOSTS, SIZES)
    return [
        {"hosts": n, "rate": rate, "mib": mib, "repeats": REPEATS}
        for rate, n, mib in itertools.product(rates, hosts, sizes)
    ]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """All exchanges of one size, in turns; every rank returns the same result. Collective."""
    comm, values = bk.Comm(), cell["mib"] << 18
    base = torch.randn(values, generator=torch.Generator().manual_seed(0))
    BYTE.warm_up("cpu")
    for exchange in EXCHANGES.values():  # connections are made
        exchange.call(torch.zeros(1 << 18), comm.at(0))
    tasks = {name: task(name, exchange, base, comm) for name, exchange in EXCHANGES.items()}
    found = turns(comm, cell["repeats"], tasks)
    return {name: found[name] | {"formula": each.sends(values, comm.size)} for name, each in EXCHANGES.items()}


class Task(NamedTuple):
    """An operation to time, on what `make` returns in its round, and the check of its result, which raises."""

    make: Callable[[], Tensor]
    call: Callable[[Tensor, int], Any]
    check: Callable[[Any, int], None]


def task(name: str, exchange: Exchange, base: Tensor, comm: bk.Comm) -> Task:
    """Return the task of an exchange, which overwrites what it is given."""

    def call(x: Tensor, round: int) -> Tensor:
        exchange.call(x, comm.at(round))
        return x

    return Task(
        lambda: base + comm.rank,
        call,
        lambda x, round: check(name, exchange, x, base, comm.rank, comm.size, round),
    )


def turns(comm: bk.Comm, repeats: int, tasks: Mapping[str, Task]) -> dict[str, dict[str, Any]]:
    """Time the tasks in turns; every rank returns the same times, and the mean of the bytes. Collective."""
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    passed: dict[str, list[Counters]] = {name: [] for name in tasks}
    for round in range(repeats):
        for name, each in tasks.items():
            x = each.make()
            dist.barrier()
            before, began = counted(), time.perf_counter()
            result = each.call(x, round)
            ended = time.perf_counter()
            each.check(result, round)
            marks = comm.gather_objects((began, ended))
            after = counted()  # all that was sent has been received, and left this host
            taken[name].append(max(end for _, end in marks) - min(begin for begin, _ in marks))
            passed[name].append(after - before)
    every = comm.gather_objects(passed)
    return {
        name: {
            **told(taken[name]),
            "sent": statistics.mean(c.sent for one in every for c in one[name]) / share(comm.size),
            "payload": statistics.mean(c.payload for one in every for c in one[name]) / share(comm.size),
        }
        for name in tasks
    }


def told(seconds: Sequence[float]) -> dict[str, Any]:
    """Return the median and the quartiles of repeated times."""
    return {"seconds": statistics.median(seconds), "quartiles": statistics.quantiles(seconds, n=4, method="inclusive")}


def check(name: str, exchange: Exchange, x: Tensor, base: Tensor, rank: int, n: int, round: int) -> None:
    """Raise unless the result is the mean it should be: of base + r over ranks r that is base + the mean of the r."""
    weights = exchange.weights(rank, n, round)
    expected = base + sum(weight * peer for peer, weight in weights.items())
    error = float((x - expected).abs().max())
    if not error <= exchange.tolerance:
        raise AssertionError(f"{name} is off by {error:g} on rank {rank} of {n} in round {round}: not timed")


if __name__ == "__main__":
    on_every_host(measure)
