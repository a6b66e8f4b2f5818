"""New process groups of the same ranks, and flows: parallel connections, among which messages are divided.

Each flow has its own process group, and so its own connections. Flow i sends the share s_i of each message. Let T_i be
the time that flow i took, summed over messages and ranks since the last agreement. The new shares are

    s_i ← s_i / T_i,  scaled so that Σ s_i = 1

At the fixed point all flows end at the same time. One small all-reduce per `PERIOD` messages adds the T_i of all ranks.
"""

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from itertools import accumulate, pairwise
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..lanes import CpuLane
from .groups import lazy, own_group
from .sending import FLAT, INTER, INTRA

SMALLEST = 1 << 18  # bytes of the smallest message that is divided
PERIOD = 16  # messages between two agreements
LEAST = 1 / 8  # the smallest share of a flow, relative to an equal share: a recovery is then noticed
LINE = 64  # shares are multiples of this many values, so that they are aligned to cache lines
ENDING = 5.0  # seconds that an abort may take

REFERENCES = 3  # to an aborted group: by `abort_all`, by a list in `let_go`, and by the call that counts them
_aborted: WeakSet[Any] = WeakSet()
_kept: list[Any] = []  # aborted groups that connected lazily
_letting_go = threading.Lock()

Parts = tuple[Any, Any] | None
"""The intra and inter groups of this rank; None without a mesh."""


class Flows:
    """Process groups of the same ranks, one a flow. The first also sends messages that are too small to divide."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self.groups: list[Any] = list(groups)
        self.shares: list[float] = [1 / len(self.groups)] * len(self.groups)
        self.seconds: list[float] = [0.0] * len(self.groups)  # since the last agreement
        self.lanes = [CpuLane("baguakit flow") for _ in self.groups[1:]]
        self._settled = 0

    def parts(self, n: int, nbytes: int) -> list[slice]:
        """Return the slice of `n` values for each flow, equal on all ranks; a small message has only one slice."""
        if nbytes < SMALLEST:
            return [slice(0, n)]
        ends = [min(n, round(total * n / LINE) * LINE) for total in accumulate(self.shares[:-1])]
        return [slice(begin, end) for begin, end in pairwise([0, *ends, n])]

    def begin(self, x: Tensor, begin: Callable[[slice, Any], Any]) -> "Shares":
        """Begin to send or receive the flat `x` in parts; `begin(part, group)` begins a part and returns its work."""
        if x.is_cuda:
            raise ValueError("flows divide messages over gloo; for more connections of NCCL, see baguakit.net")
        return Shares(self, x, begin)

    def settle(self, before: Callable[[], None]) -> None:
        """Agree on new shares in every `PERIOD`-th call, after `before()` returns. Collective."""
        self._settled += 1
        if self._settled % PERIOD:
            return
        before()
        taken = torch.tensor(self.seconds, dtype=torch.float64)
        dist.all_reduce(taken, group=self.groups[0])
        self.seconds = [0.0] * len(self.groups)
        if (taken > 0).all():  # otherwise no message was divided
            self.shares = reweighed(self.shares, taken.tolist())

    def close(self) -> None:
        for lane in self.lanes:
            lane.close(wait=False)


class Shares:
    """The work of a divided message; the arguments are as in `Flows.begin`."""

    def __init__(self, flows: Flows, x: Tensor, begin: Callable[[slice, Any], Any]) -> None:
        flown = [(i, s) for i, s in enumerate(flows.parts(x.numel(), x.nbytes)) if s.stop > s.start]
        self._works = [(i, begin(s, flows.groups[i])) for i, s in flown]
        self._flows, self._began = flows, time.perf_counter()

    def wait(self) -> None:
        """Wait for the shares of all flows at the same time, and record the time of each."""
        flows, works, self._works = self._flows, self._works, []

        def wait(flow: int, work: Any) -> None:
            work.wait()
            if len(works) > 1:
                flows.seconds[flow] += time.perf_counter() - self._began

        others = [flows.lanes[i - 1].run(lambda i=i, work=work: wait(i, work)) for i, work in works[1:]]  # type: ignore[misc]
        for i, work in works[:1]:
            wait(i, work)
        for other in others:
            other.result()


def reweighed(shares: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Return the shares s_i / T_i, scaled to the sum 1. Small shares are raised to `LEAST` times an equal share."""
    rates = [share / taken for share, taken in zip(shares, seconds, strict=True)]
    floored = [max(rate / sum(rates), LEAST / len(rates)) for rate in rates]
    return [share / sum(floored) for share in floored]


def longer(timeout: timedelta) -> timedelta:
    """Return the timeout of a flight's messages. The monitor has a shorter timeout, and so names a rank first."""
    return timeout * 1.25 + timedelta(seconds=2)


def timeout_of(group: Any) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[no-any-return]


def set_timeout(group: Any, timeout: timedelta) -> None:
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout)


def own_groups(
    comm: Any, flows: int, parts: Collection[str], name: str, timeout: timedelta, device: torch.device, store: Any
) -> tuple[Any, Parts, dict[str, Flows]]:
    """Return new groups of the ranks of `comm`: flat, (intra, inter) or None, and flows. Collective."""
    let_go()
    nodes = comm._parts if flows > 1 or not {INTRA, INTER}.isdisjoint(parts) else None
    group = own_group(comm.group, store, f"{name}/flat", timeout, device)
    if nodes is not None:
        places = (f"{name}/intra{nodes[1].rank()}", f"{name}/inter{nodes[0].rank()}")
        intra, inter = (own_group(part, store, at, timeout, device) for part, at in zip(nodes, places, strict=True))
        nodes = (intra, inter)
    return group, nodes, flows_of(group, nodes, flows if comm.size > 1 else 1, name, timeout, store)


def flows_of(group: Any, parts: Parts, count: int, name: str, timeout: timedelta, store: Any) -> dict[str, Flows]:
    """Return {part: flows}, `count` between all ranks or, with a mesh, nodes. The first flow uses a present group."""
    if count == 1:
        return {}
    part, first, place = (FLAT, group, "") if parts is None else (INTER, parts[1], f"/inter{parts[0].rank()}")
    names = [f"{name}/flow{i}{place}" for i in range(1, count)]
    return {part: Flows([first, *(own_group(first, store, each, timeout, torch.device("cpu")) for each in names)])}


def abort_all(groups: Iterable[Any]) -> None:
    """Abort all messages of groups that this package made, in all groups at the same time.

    NCCL's abort waits until the device has completed earlier launches. Such a launch may be a message in another group
    that waits for a lost rank, so one abort after another would block. This function waits `ENDING` seconds at most.

    Groups that connect with their first messages are kept until `let_go` frees them, even while the process exits.
    Freeing a group waits for its last collective, which an abort does not end. If a rank was lost before the first
    message to it, this wait takes the timeout of the group. In a garbage collection it would block the process.
    """

    def abort(group: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it took too long, which torch logs; the cause is raised elsewhere
            group.abort()

    alive = [group for group in groups if group not in _aborted]
    _aborted.update(alive)
    for group in lazy.intersection(alive):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))  # the end of the interpreter empties the list
        _kept.append(group)
    threads = [threading.Thread(target=abort, args=(g,), name="baguakit abort", daemon=True) for g in alive]
    for thread in threads:
        thread.start()
    until = time.monotonic() + ENDING
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def let_go() -> int:
    """Free, on threads, the groups that only `abort_all` keeps; return the number of groups that are still kept."""
    with _letting_go:
        for _ in range(len(_kept)):
            held = [_kept.pop(0)]
            if sys.getrefcount(held[0]) > REFERENCES:
                _kept.extend(held)
            else:
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(held[0]))
                threading.Thread(target=held.clear, name="baguakit free", daemon=True).start()
        return len(_kept)


def shut_all(groups: Iterable[Any]) -> None:
    for group in groups:
        if group not in _aborted:
            group.shutdown()
