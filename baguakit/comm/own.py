"""Separate groups: the same ranks in new process groups, and further groups for flows."""

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch

from .flows import Flows
from .groups import lazy, own_group
from .sending import FLAT, INTER

ENDING = 5.0  # seconds that an abort may take

REFERENCES = 3  # to an aborted group: by `abort_all`, by a list in `let_go`, and by the call that counts them
_aborted: WeakSet[Any] = WeakSet()
_kept: list[Any] = []  # aborted groups that connected lazily
_letting_go = threading.Lock()

Parts = tuple[Any, Any] | None
"""The intra and inter groups of this rank; None without a mesh."""


def longer(timeout: timedelta) -> timedelta:
    """Return the timeout of the messages of a flight, later than that of the monitor, which names ranks."""
    return timeout * 1.25 + timedelta(seconds=2)


def timeout_of(group: Any) -> timedelta:
    """Return the timeout of the messages of a group over gloo."""
    return group._get_backend(torch.device("cpu")).options._timeout  # type: ignore[no-any-return]


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of the messages of a group that was made here."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(timeout)


def own_groups(
    group: Any, parts: Parts, name: str, timeout: timedelta, device: torch.device, store: Any = None
) -> tuple[Any, Parts]:
    """Return new groups of the same ranks, made by `store` or that of the group, under an agreed name. Collective."""
    store = group.get_group_store() if store is None else store
    own = own_group(group, store, f"{name}/flat", timeout, device)
    if parts is None:
        return own, None
    places = (f"{name}/intra{parts[1].rank()}", f"{name}/inter{parts[0].rank()}")
    intra, inter = (own_group(part, store, at, timeout, device) for part, at in zip(parts, places, strict=True))
    return own, (intra, inter)


def flows_of(
    group: Any, parts: Parts, count: int, name: str, timeout: timedelta, store: Any = None
) -> dict[str, Flows]:
    """Return {part: flows}, `count` flows between all ranks or, with a mesh, between nodes; {} for one. Collective.

    The first flow uses the given group.
    """
    if count == 1:
        return {}
    part, first, place = (FLAT, group, "") if parts is None else (INTER, parts[1], f"/inter{parts[0].rank()}")
    store, cpu = group.get_group_store() if store is None else store, torch.device("cpu")
    further = [own_group(first, store, f"{name}/flow{i}{place}", timeout, cpu) for i in range(1, count)]
    return {part: Flows([first, *further])}


def abort_all(groups: Iterable[Any]) -> None:
    """Abort all messages of groups that were made here, in all groups at the same time.

    NCCL ends a communicator when the device has completed earlier launches. One of these may be a message of another
    communicator that waits for a rank that has ended: one abort after another would block. It waits at most `ENDING`.

    Groups that connect with their first messages are kept until `let_go`, also when the process ends: the end of a
    group waits for its last collective, which an abort does not end. If a rank was lost before the first message to
    it, that takes the timeout of the group, and a garbage collection would stop the process meanwhile.
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
    """Free the aborted groups that are kept and that nothing else refers to, on threads; return how many are left."""
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
    """Shut down groups that were made here, except those that were aborted."""
    for group in groups:
        if group not in _aborted:
            group.shutdown()
