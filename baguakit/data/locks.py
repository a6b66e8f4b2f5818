"""Locks between threads that are free in a forked child."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType


class ThreadLock:
    """A lock that is free in a forked child, even if a thread of the parent held it.

    It is reentrant, since the garbage collector may run a finalizer in the thread that holds it.
    """

    def __init__(self) -> None:
        self._of = (os.getpid(), threading.RLock())

    def __enter__(self) -> None:
        if self._of[0] != os.getpid():
            self._of = (os.getpid(), threading.RLock())
        self._of[1].acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._of[1].release()


class KeyedLocks:
    """One lock per key between the threads of a process; unused keys take no memory."""

    def __init__(self) -> None:
        self._guard, self._pid = ThreadLock(), os.getpid()
        self._locks: dict[bytes, tuple[threading.Lock, int]] = {}

    @contextmanager
    def hold(self, key: bytes) -> Iterator[None]:
        """Hold the lock of this key."""
        with self._guard:
            if self._pid != os.getpid():
                self._pid, self._locks = os.getpid(), {}
            lock, waiting = self._locks.get(key, (threading.Lock(), 0))
            self._locks[key] = lock, waiting + 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                lock, waiting = self._locks[key]
                self._locks[key] = lock, waiting - 1
                if waiting == 1:
                    del self._locks[key]
