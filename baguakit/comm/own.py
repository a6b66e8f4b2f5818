"""Separate groups: the same ranks in new process groups, and further groups for flows."""

import contextlib
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch

from .flows import Flows
from .groups import INTER, own_group

ENDING = 5.0  # seconds that an abort may take

_aborted: WeakSet[Any] = WeakSet()

Parts = tuple[Any, Any] | None
"""The intra and inter groups of this rank; None without a mesh."""


def own_groups(
    group: Any, parts: Parts, name: str, timeout: timedelta, device: torch.device, store: Any = None
) -> tuple[Any, Parts]:
    """Return new groups of the same ranks, made by `store` or that of the group, under an agreed name. Collective."""
    store = group.get_group_store() if store is None else store
    own = own_group(group, store, f"{name}/flat", timeout, device)
    if parts is None:
        return own, None
    intra, inter = parts
    return own, (
        own_group(intra, store, f"{name}/intra{inter.rank()}", timeout, device),
        own_group(inter, store, f"{name}/inter{intra.rank()}", timeout, device),
    )


def flows_of(
    group: Any, parts: Parts, count: int, name: str, timeout: timedelta, store: Any = None
) -> dict[str, Flows]:
    """Return {part: flows}, `count` flows between all ranks or, with a mesh, between nodes; {} for one. Collective.

    The first flow uses the given group.
    """
    if count == 1:
        return {}
    part, first, place = ("flat", group, "") if parts is None else (INTER, parts[1], f"/inter{parts[0].rank()}")
    store, cpu = group.get_group_store() if store is None else store, torch.device("cpu")
    further = [own_group(first, store, f"{name}/flow{i}{place}", timeout, cpu) for i in range(1, count)]
    return {part: Flows([first, *further])}


def abort_all(groups: Iterable[Any]) -> None:
    """Abort all messages of groups that were made here, in all groups at the same time.

    NCCL ends a communicator when the device has completed earlier launches. One of these may be a message of another
    communicator that waits for a rank that has ended: one abort after another would block. It waits at most `ENDING`.
    """
    alive = [group for group in groups if group not in _aborted]
    _aborted.update(alive)
    threads = [threading.Thread(target=_abort, args=(g,), name="baguakit abort", daemon=True) for g in alive]
    for thread in threads:
        thread.start()
    until = time.monotonic() + ENDING
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):  # it took too long, which torch logs; the cause is raised elsewhere
        group.abort()


def shut_all(groups: Iterable[Any]) -> None:
    """Shut down groups that were made here, except those that were aborted."""
    for group in groups:
        if group not in _aborted:
            group.shutdown()
