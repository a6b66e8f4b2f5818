"""The start of a runtime: first the monitor, then its own groups, so that a rank that never comes is named."""

import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from datetime import timedelta
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..comm import HOSTS, Comm
from ..comm.groups import PatientStore, host, lazy, next_name, ranks_by_host, store_of
from ..lanes import CpuLane
from ..monitor import Monitor, PeerError, end_with_process, store_gone, store_silent
from ..primitives.neighbors import is_mean, links
from ..rules import Rule
from ..stages import Hierarchical, Stage
from ..topology import Chosen, Topology
from .channels import Channel
from .setup import as_time

ROUNDS = 16  # of a topology, whose connections are made at the start
SLOWEST_CONNECTION = 5.0  # seconds that the store may take to answer a new connection: it may look up a name first


def start_monitor(
    comm: Comm, kind: str, timeout: Any, abort: Callable[[], None], broken: Callable[[], str]
) -> tuple[str, Monitor]:
    """Return a name that is the same on all ranks, for hooks of this kind, and the monitor started under it.

    An invalid `timeout` is left to the setup, which raises the error on all ranks.

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
        if store is not None:
            monitor.run = store.compare_set("run", "", monitor.run).decode()  # that of the first that comes
        return name, monitor

    if comm.size == 1:
        return started()
    lane = CpuLane("baguakit start")
    flight, seconds = lane.run(started), max(SLOWEST_CONNECTION, time_limit.total_seconds())
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
    """Return a Comm of the same ranks with its own groups. Collective; with one rank, return `comm` itself.

    A rank that does not come, which the monitor names, keeps the first message of a group waiting beyond all timeouts:
    so that runs on a thread that is not joined, with a store that gives up when the monitor does. (NCCL waits in its
    own threads, which Python must not slow down.) Only groups of the kinds in `parts` are made; `name` is the same on
    all ranks.
    """
    if comm.size == 1:
        return comm
    current = torch.cuda.current_device() if device.type == "cuda" else None
    store = PatientStore(comm.group, monitor.wait_until) if current is None else None

    def made() -> Comm:
        if current is not None:
            torch.cuda.set_device(device if device.index is not None else current)
        return comm.own(name, timeout, device, flows, store, parts)

    start = CpuLane("baguakit start")
    try:
        own: Comm = Channel(0, start, comm, monitor).together(f"the group {name}", lambda _: made())
    finally:
        start.close(wait=False)
    return own


def warn_of_shared_cards(channel: Channel, packs: Sequence[Any]) -> None:
    """Warn on rank 0 if ranks of one host share its network card and something packs for each other rank. Collective.

    Of the packed bucket, with L of the N ranks on each of n hosts, a card sends L (1 − 1/n) times to the owners of
    shards and (N − 1)/N times around a ring; if only the hosts' shards are compressed, 2 (1 − 1/n) times. `packs` are
    the rules or the policy that does so, if any.
    """
    N = channel.comm.size
    if not packs or channel.comm.hierarchical or N < 4:
        return
    hosts = ranks_by_host(channel.together("the hosts of all ranks", lambda comm: comm.gather_objects(host())))
    n, L = len(hosts), len(hosts[0])
    if channel.comm.rank == 0 and n > 1 and L > 1 and n * L == N:
        warnings.warn(
            f"{N} ranks share the network cards of {n} hosts: {packs[0]!r} sends its packed values "
            f"{L * (1 - 1 / n) + (N - 1) / N:.2f} times over each card, and bk.hierarchical(…) {2 * (1 - 1 / n):.2f} "
            f'times: use that in BaguaStrategy or, with comm=bk.Comm(mesh="{HOSTS}"), in bk.attach or bk.interop.ddp',
            stacklevel=2,
        )


def packs_flat(rule: Rule) -> bool:
    """Return whether a rule compresses a mean of all ranks in each step, not within `Hierarchical`."""
    stages = rule.stage.whole() if rule.every == 1 else []
    packs = any(each.same_on_all_ranks and any(c.dense for c in each.compressors()) for each in stages)
    return packs and not any(each.shards for each in stages)


def warm_up(stages: Sequence[Stage], tensors: Sequence[Tensor], channel: Channel) -> None:
    """Compile the work of stages on tensors like these, and connect the ranks between which they send. Collective.

    The other ranks wait for this one beyond the timeout.
    """
    if channel.comm.size > 1:
        with channel.monitor.busy("compiling"):
            for stage, x in product(stages, tensors):
                for each in stage.whole():
                    each.prepare(x, channel.comm)
        if any(topologies_of(each) for stage in stages for each in stage.whole()):
            x = tensors[0].new_zeros(1)
            channel.together("first messages", lambda comm: connect(stages, x, comm))


def connect(stages: Iterable[Stage], x: Tensor, comm: Comm) -> None:
    """Send `x` (1,) to the ranks that stages will send to, so that no step waits for connections. Collective.

    The first `ROUNDS` of a topology are played as its stage will play them, so that no order of messages can block.
    Groups of gloo that connected at once, and rounds that are an all-reduce, need nothing.
    """
    n = comm.size
    for stage in stages:
        for topology in topologies_of(stage) if x.is_cuda or comm.group in lazy else ():
            for round in range(min(topology.period(n), ROUNDS)):
                if not is_mean(topology, n, round):
                    _, sources, targets = links(topology, comm.rank, n, round)
                    comm.exchange(x, sources, targets)
        connect(stage.nested().values(), x, comm.inter if isinstance(stage, Hierarchical) else comm)


def topologies_of(stage: Stage) -> list[Topology]:
    """Return the topologies in the fields of a stage, but those whose weights are chosen round by round."""
    held = [getattr(stage, each.name) for each in fields(stage)]
    return [each for each in held if isinstance(each, Topology) and not isinstance(each, Chosen)]
