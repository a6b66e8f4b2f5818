"""The interface of stores, which keep cached samples as bytes by key; and a store in the memory of a process."""

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

from ..arguments import Doors, integer

Opened = TypeVar("Opened", bound="Store")
DATASET = 16  # bytes of a key that identify its dataset


class StoreError(RuntimeError):
    """An error of a store. `CachedDataset` then computes the samples without the store."""


class Store(Doors, ABC):
    """The base class of stores, which keep bytes by key. The first 16 bytes of a key identify the dataset.

    Methods are thread-safe. If a store fails, its methods raise StoreError only. A store can be passed to forked and
    spawned processes, each of which opens the store again.
    """

    doors: ClassVar[frozenset[str]] = frozenset({"get", "put", "claim", "clear", "get_many"})
    shared = True  # all processes see the same samples

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Return the bytes stored under `key`, or None."""

    @abstractmethod
    def put(self, key: bytes, value: bytes) -> bool:
        """Store `value` under `key` and return True; return False if the store is full."""

    @abstractmethod
    def claim(self, key: bytes) -> AbstractContextManager[None]:
        """Hold the lock of `key` in a `with` block, so that no other thread or process computes the sample.

        If a process dies, its lock is freed. If the store fails, the block runs unlocked; this costs time only.
        """

    @abstractmethod
    def clear(self, namespace: bytes = b"") -> None:
        """Delete the samples whose keys begin with `namespace`; by default, all samples."""

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the result of `get` for each key, in order."""
        return [self.get(key) for key in keys]

    def close(self) -> None:
        """Release all resources; a store on disk first syncs its samples. The next use opens the store again."""

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ThreadLock:
    """A reentrant lock that is free in a forked child even if a thread of the parent held it."""

    def __init__(self) -> None:
        self._of = (os.getpid(), threading.RLock())

    def __enter__(self) -> None:
        if self._of[0] != os.getpid():
            self._of = (os.getpid(), threading.RLock())
        self._of[1].acquire()

    def __exit__(self, *_: object) -> None:
        self._of[1].release()


class KeyedLocks:
    """Locks by key, for the threads of a process. A lock exists only while a thread uses it."""

    def __init__(self) -> None:
        self._guard, self._locks = ThreadLock(), WeakValueDictionary[bytes, ThreadLock]()

    @contextmanager
    def hold(self, key: bytes) -> Iterator[None]:
        with self._guard:
            lock = self._locks.setdefault(key, ThreadLock())
        with lock:
            yield


class MemoryStore(Store):
    """A store in the memory of this process, for loaders without workers, because each worker would have its own store.

    A full store keeps its samples and takes no new ones: LRU eviction would remove the sample that is needed next.

    Args:
        capacity_bytes: the limit, in bytes of encoded samples, 1 or more; None for no limit.
    """

    shared = False

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = None if capacity_bytes is None else integer("capacity_bytes", capacity_bytes, 1)
        self._samples, self._used = dict[bytes, bytes](), 0
        self._guard, self._claims = ThreadLock(), KeyedLocks()

    def __repr__(self) -> str:
        return f"MemoryStore(capacity_bytes={self.capacity_bytes})"

    def __reduce__(self) -> Any:
        return type(self), (self.capacity_bytes,)

    def get(self, key: bytes) -> bytes | None:
        return self._samples.get(key)

    def put(self, key: bytes, value: bytes) -> bool:
        with self._guard:
            used = self._used + len(value) - len(self._samples.get(key, b""))
            if self.capacity_bytes is not None and used > self.capacity_bytes:
                return False
            self._samples[key], self._used = value, used
            return True

    def claim(self, key: bytes) -> AbstractContextManager[None]:
        return self._claims.hold(key)

    def clear(self, namespace: bytes = b"") -> None:
        with self._guard:
            self._samples = {k: v for k, v in self._samples.items() if not k.startswith(namespace)}
            self._used = sum(map(len, self._samples.values()))
