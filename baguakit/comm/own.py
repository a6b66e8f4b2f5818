"""Groups of one's own: the same ranks again, used by nothing else, and further ones for the flows of their messages."""

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

ENDING = 5.0  # seconds that giving up may take

_aborted: WeakSet[Any] = WeakSet()

Parts = tuple[Any, Any] | None
"""The intra and inter groups of this rank, where the nodes are known."""


def own_groups(
    group: Any, parts: Parts, name: str, timeout: timedelta, device: torch.device, store: Any = None
) -> tuple[Any, Parts]:
    """New groups of the same ranks, that meet in `store`, or the group's, under an agreed name. All members call it."""
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
    """`count` flows between all ranks, or, where the nodes are known, between nodes: by part. None for a count of 1.

    The first flow is the group that is there. All members call it.
    """
    if count == 1:
        return {}
    part, first, place = ("flat", group, "") if parts is None else (INTER, parts[1], f"/inter{parts[0].rank()}")
    store, cpu = group.get_group_store() if store is None else store, torch.device("cpu")
    further = [own_group(first, store, f"{name}/flow{i}{place}", timeout, cpu) for i in range(1, count)]
    return {part: Flows([first, *further])}


def abort_all(groups: Iterable[Any]) -> None:
    """Give up whatever is under way in groups that were made here, in all of them at once.

    At once, because NCCL ends a communicator when the device is through with what was launched before, and that may be
    a message of another one, which waits for a rank that is gone. What takes longer than `ENDING` is left to itself.
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
    with contextlib.suppress(RuntimeError):  # it took too long, which torch logs; a sentence on the cause is under way
        group.abort()


def shut_all(groups: Iterable[Any]) -> None:
    """End groups that were made here; of those that were given up nothing is left to end, nor to wait for."""
    for group in groups:
        if group not in _aborted:
            group.shutdown()
