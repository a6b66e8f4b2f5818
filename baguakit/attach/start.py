"""How hooks set out: the monitor first, and then groups of their own, so that a rank which never comes is named."""

from collections.abc import Callable, Collection, Iterable
from datetime import timedelta
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm, PatientStore, next_name, store_of
from ..lanes import CpuLane
from ..primitives.compressed import prepare
from ..stages import Stage
from .endings import end_with_process
from .errands import begin_on, end
from .judging import store_gone, store_silent
from .monitor import Monitor, PeerError
from .plan import as_time

LEAST = 5.0  # seconds that the store may take to answer a new connection: it may look up a name first


def start_monitor(
    comm: Comm, kind: str, timeout: Any, abort: Callable[[], None], broken: Callable[[], str]
) -> tuple[str, Monitor]:
    """Return a name that ranks agree on, for hooks of this kind, and a monitor that watches under it.

    A `timeout` that is none is left to the plan, which raises what is wrong with it on all ranks.

    Raises:
        PeerError: the store does not answer.
    """
    try:
        time_limit = as_time(timeout)
    except (TypeError, ValueError):
        time_limit = as_time(None)

    def started() -> tuple[str, Monitor]:
        name = f"{kind}/{next_name(comm.group)}"
        store = store_of(comm.group, f"{name}/monitor") if comm.size > 1 else None
        monitor = Monitor(store, comm.rank, comm.size, time_limit, abort, broken)
        monitor.start()
        return name, monitor

    if comm.size == 1:
        return started()
    lane = CpuLane("baguakit start")
    flight, seconds = lane.run(started), max(LEAST, time_limit.total_seconds())
    lane.close(wait=False)
    if not flight.wait(seconds):
        raise PeerError(store_silent(comm.rank, seconds, "attach()", seconds))
    try:
        name, monitor = flight.result()
    except Exception as error:
        raise PeerError(store_gone(comm.rank, error)) from None
    end_with_process(monitor)
    return name, monitor


def own_comm(
    comm: Comm,
    name: str,
    timeout: timedelta,
    device: torch.device,
    monitor: Monitor,
    parts: Collection[str],
    flows: int | None = None,
) -> Comm:
    """Return the same ranks in groups of their own. Collective; with one rank, that is `comm` itself.

    Of the nodes, groups are made if `parts`, which are going to be used, have one of them.

    A peer that never comes keeps the constructor of a group waiting, beyond all timeouts: on a thread that is not
    joined, and in a store that gives up when the monitor does. (NCCL waits in threads of its own, which Python must not
    slow down.)
    """
    if comm.size == 1:
        return comm
    current = torch.cuda.current_device() if device.type == "cuda" else None
    store = PatientStore(comm.group, monitor.wait_until) if current is None else None

    def made() -> Comm:
        if current is not None:
            torch.cuda.set_device(device if device.index is not None else current)
        own = comm.own(name, timeout, device, flows, store, parts)
        if store is not None:
            store.rest()
        return own

    start = CpuLane("baguakit start")
    try:
        own: Comm = end(begin_on(start, 0, f"the group {name}", made, monitor))
        return own
    finally:
        start.close(wait=False)


def warm_up(stages: Iterable[Stage], tensors: Iterable[Tensor], comm: Comm, monitor: Monitor) -> None:
    """Compile what the stages do with tensors like these. The other ranks wait for this one beyond the timeout."""
    if comm.size > 1:
        with monitor.busy("compiling"):
            for stage, x in product(stages, tensors):
                _prepare(stage, x, comm)


def _prepare(stage: Stage, x: Tensor, comm: Comm) -> None:
    prepare(stage, x, comm)
    for inner in stage.nested().values():
        _prepare(inner, x, comm)
