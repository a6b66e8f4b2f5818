"""The interface of stores of samples: bytes by key, within a limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from ...arguments import checked

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
