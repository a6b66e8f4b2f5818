"""Several connections against one, where the network caps what a connection carries: `python -m bench.network flows`.

    cell                  connections                                    what is asked of it
    capped                1 and 8, none above 20 MB/s                    8 carry 7.5 times what one does, or more
    not capped            1 and 8, on links of 1 Gb/s and of any rate    8 carry no less than one
    one slow flow         4, one at a quarter of the others' cap         85 % of the sum of the caps, after 64 messages

The result of each exchange is checked before its time counts. A time is from the moment the first rank begins to the
moment the last has its result; what is told is the median, and the quartiles, of several, one and eight taking turns.

That time holds what ranks compute on what has arrived, which more flows do not shorten, and all ranks share the cores
of the machine. So with many hosts on few cores eight flows stay further behind their line than one does; and where
links are not shaped, it is the cores that are measured, not a network.
"""

import itertools
import socket
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import baguakit as bk
from baguakit.comm.own import PERIOD
from baguakit.compare.pacing import SO_MAX_PACING_RATE, at, bits_per_second, connections, is_tcp
from bench.netlab.capped import new_name, with_caps

from .exchanges import EXCHANGES, Exchange, check, told
from .train import on_every_host

CAP, RATE, COUNTS, HOSTS, MIB, REPEATS = "160mbit", "1gbit", (1, 8), (2, 4), 64, 7
NAMES = ("mean_", "neighbor_mean_, one peer")
SLOW_CAPS, SLOW_MIB, MESSAGES = ("160mbit", "40mbit", "160mbit", "160mbit"), 8, 64
TOLD = 16  # messages behind those, of which the throughput is told
TIMEOUT = timedelta(minutes=5)
CPU = torch.device("cpu")


def uncapped(fd: int) -> bool:
    """Return whether a descriptor is a TCP connection without a cap."""
    with at(fd) as one:
        return is_tcp(one) and one.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == -1


def cells(quick: bool) -> list[dict[str, Any]]:
    """Return the cases to measure; quick: two hosts, 16 MiB."""
    hosts, mib = (HOSTS[:1], 16) if quick else (HOSTS, MIB)
    networks = ({"rate": "unshaped", "flow_cap": CAP}, {"rate": RATE}, {"rate": "unshaped"})
    even = [
        {"hosts": n, **network, "mib": mib, "repeats": REPEATS} for network, n in itertools.product(networks, hosts)
    ]
    slow = {"hosts": 2, "rate": "unshaped", "caps": list(SLOW_CAPS), "mib": SLOW_MIB, "messages": MESSAGES}
    return [*even, slow]


def measure(cell: dict[str, Any]) -> dict[str, Any]:
    """A cell, of either kind; every rank returns the same result. Collective."""
    return one_slow_flow(cell) if "caps" in cell else against_one(cell)


def against_one(cell: dict[str, Any]) -> dict[str, Any]:
    """Exchanges over one flow and over eight, in turns."""
    values, name = cell["mib"] << 18, new_name()
    comms = {count: bk.Comm().own(f"{name}/{count}", TIMEOUT, CPU, count) for count in COUNTS}
    base = torch.randn(values, generator=torch.Generator().manual_seed(0))
    for name, comm in itertools.product(NAMES, comms.values()):  # connections are made, memory is touched
        EXCHANGES[name].call(base.clone(), comm.at(0))
    if "flow_cap" in cell:
        await_caps()
    taken: dict[tuple[str, int], list[float]] = {place: [] for place in itertools.product(NAMES, COUNTS)}
    for round in range(cell["repeats"]):
        for name, count in taken:
            taken[name, count].append(timed(name, EXCHANGES[name], base, comms[count].at(round)))
    for comm in comms.values():
        comm.close()
    return {
        name: {str(count): told(taken[name, count]) for count in COUNTS}
        | {"formula": EXCHANGES[name].sends(values, comm.size)}
        for name in NAMES
    }


def one_slow_flow(cell: dict[str, Any]) -> dict[str, Any]:
    """All-reduces over flows with caps of their own: what they carry once shares have followed the rates."""
    values, name = cell["mib"] << 18, "mean_"
    comm = with_caps(bk.Comm(), [bits_per_second(rate) / 8 for rate in cell["caps"]], TIMEOUT)
    base = torch.randn(values, generator=torch.Generator().manual_seed(0))
    taken = [timed(name, EXCHANGES[name], base, comm.at(round)) for round in range(cell["messages"] + TOLD)]
    shares = comm._flows["flat"].shares
    comm.close()
    return {
        **told(taken[-TOLD:]),
        "with_even_shares": statistics.median(taken[1:PERIOD]),
        "shares": shares,
        "formula": EXCHANGES[name].sends(values, comm.size),
    }


def timed(name: str, exchange: Exchange, base: torch.Tensor, comm: bk.Comm) -> float:
    """Seconds of one exchange, the same on every rank, once its result has been checked. Collective."""
    x = base + comm.rank
    dist.barrier()
    began = time.perf_counter()
    exchange.call(x, comm)
    ended = time.perf_counter()
    check(name, exchange, x, base, comm.rank, comm.size, comm.round)
    marks = bk.Comm().gather_objects((began, ended))
    return max(end for _, end in marks) - min(begin for begin, _ in marks)


def await_caps() -> None:
    """Wait until the laboratory has capped every connection of this process. Collective."""
    until = time.monotonic() + 60
    while any(map(uncapped, connections().values())):
        if time.monotonic() > until:
            raise TimeoutError("the laboratory has left connections of this process without a cap for a minute")
        time.sleep(0.01)
    dist.barrier()


if __name__ == "__main__":
    on_every_host(measure)
