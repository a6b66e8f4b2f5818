"""Stores of cached samples: bytes by key, within a limit; and the one in the memory of a process."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from ..arguments import checked, integer
from .locks import KeyedLocks, ThreadLock

Opened = TypeVar("Opened", bound="Store")
CHECKED = {"get", "put", "claim", "clear", "get_many", "enter", "leave"}  # methods whose arguments are checked
DATASET = 16  # bytes of a key that identify its dataset


class StoreError(RuntimeError):
    """An error of a store; samples are computed without it."""


@dataclass(frozen=True)
class StoreStats:
    """The contents of a store: `entries` samples of all datasets take `bytes` of `capacity` bytes (None: no limit)."""

    entries: int
    bytes: int
    capacity: int | None


class Store(ABC):
    """The base of stores: bytes by key. The first 16 bytes of a key identify the dataset.

    Methods raise StoreError only. They are thread-safe. A store can be passed to forked and spawned processes, each of
    which opens it again.

    Attributes:
        shared: whether all processes see the same samples.
    """

    def __init_subclass__(cls) -> None:
        """Let the methods of every store check their arguments."""
        for name in CHECKED & vars(cls).keys():
            setattr(cls, name, checked(vars(cls)[name], like=getattr(Store, name)))

    shared = True

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Return the bytes stored under `key`, or None."""

    @abstractmethod
    def put(self, key: bytes, value: bytes) -> bool:
        """Store `value`; return False if the store is full."""

    @abstractmethod
    def claim(self, key: bytes) -> AbstractContextManager[None]:
        """Hold the lock of `key` among all processes that share the store; it is released if the process dies.

        If the store fails, the body runs without the lock: a sample may then be computed twice, but is never wrong.
        """

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the number of samples and the bytes that they take."""

    @abstractmethod
    def clear(self, namespace: bytes = b"") -> None:
        """Delete the samples of one dataset, or of all datasets."""

    @checked
    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return `get` for each key, in order."""
        return [self.get(key) for key in keys]

    @checked  # noqa: B027
    def enter(self, namespace: bytes) -> None:
        """Register that this process uses the dataset: its samples are not deleted to store others."""

    @checked  # noqa: B027
    def leave(self, namespace: bytes) -> None:
        """Register that this process no longer uses the dataset."""

    def flush(self) -> None:  # noqa: B027
        """Write the samples to persistent storage, if the store has any."""

    def close(self) -> None:  # noqa: B027
        """Flush and release all resources; the next use opens the store again."""

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def package(name: str, user: str) -> Any:
    """Return an optional package; raise ImportError, with the command that installs it, if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{user} needs the {name} package: pip install baguakit[data]") from None


class MemoryStore(Store):
    """A store in the memory of this process, for data that is read without loader workers (each would have its own).

    A full store deletes the samples of datasets that no open cache uses. After that it keeps its samples and takes no
    new ones: an epoch reads each sample once, so the least recently used sample is the next to be needed.

    Args:
        capacity_bytes: the limit, in bytes of encoded samples; None for no limit.

    Raises:
        TypeError: `capacity_bytes` is not a whole number.
        ValueError: `capacity_bytes` is less than 1.
    """

    shared = False

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = None if capacity_bytes is None else integer("capacity_bytes", capacity_bytes, 1)
        self._empty()

    def _empty(self) -> None:
        self._samples, self._used, self._guard = dict[bytes, bytes](), 0, ThreadLock()
        self._datasets, self._claims = Counter[bytes](), KeyedLocks()

    def __repr__(self) -> str:
        return f"MemoryStore(capacity_bytes={self.capacity_bytes})"

    def __getstate__(self) -> dict[str, Any]:
        return {"capacity_bytes": self.capacity_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._empty()

    def get(self, key: bytes) -> bytes | None:
        return self._samples.get(key)

    def put(self, key: bytes, value: bytes) -> bool:
        with self._guard:
            more = len(value) - len(self._samples.get(key, b""))
            if self._over(more):
                self._drop_idle()
                if self._over(more):
                    return False
            self._samples[key] = value
            self._used += more
            return True

    def _over(self, more: int) -> bool:
        return self.capacity_bytes is not None and self._used + more > self.capacity_bytes

    def _drop_idle(self) -> None:
        self._samples = {k: v for k, v in self._samples.items() if self._datasets[k[:DATASET]] > 0}
        self._used = sum(map(len, self._samples.values()))

    def claim(self, key: bytes) -> AbstractContextManager[None]:
        return self._claims.hold(key)

    def enter(self, namespace: bytes) -> None:
        with self._guard:
            self._datasets[namespace] += 1

    def leave(self, namespace: bytes) -> None:
        with self._guard:
            self._datasets[namespace] -= 1

    def stats(self) -> StoreStats:
        return StoreStats(len(self._samples), self._used, self.capacity_bytes)

    def clear(self, namespace: bytes = b"") -> None:
        with self._guard:
            self._samples = {k: v for k, v in self._samples.items() if not k.startswith(namespace)}
            self._used = sum(map(len, self._samples.values()))
