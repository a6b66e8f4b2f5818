"""The interface of stores of samples: bytes by key, each computed once, within a limit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from ...arguments import checked

Opened = TypeVar("Opened", bound="Store")
CHECKED = {"get", "put", "claim", "clear", "get_many", "enter", "leave"}  # what is checked of every store


class StoreError(RuntimeError):
    """The store is broken or away; samples are recomputed."""


@dataclass(frozen=True)
class StoreStats:
    """`entries` samples in `bytes` of `capacity` bytes (None: no limit of its own), over all datasets."""

    entries: int
    bytes: int
    capacity: int | None


class Store(ABC):
    """Bytes by key. The first 16 bytes of a key name the dataset. Methods raise StoreError, and nothing else.

    Safe in threads; goes to forked and spawned processes, each of which opens it anew.
    """

    def __init_subclass__(cls) -> None:
        """Check what the methods of every store are given, once for all of them."""
        for name in CHECKED & vars(cls).keys():
            setattr(cls, name, checked(vars(cls)[name], like=getattr(Store, name)))

    shared = True  # whether other processes see what this one puts

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """Return the bytes that were put under `key`, or None."""

    @abstractmethod
    def put(self, key: bytes, value: bytes) -> bool:
        """Keep `value`; False where the store is full."""

    @abstractmethod
    def claim(self, key: bytes) -> AbstractContextManager[None]:
        """Held by one at a time of all who share the store; freed when its holder dies. Where it cannot be had in a
        broken store, goes on without: a sample may then be computed twice, never wrongly."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """How much is stored."""

    @abstractmethod
    def clear(self, namespace: bytes = b"") -> None:
        """Drop the samples of one dataset, or all that this store holds."""

    @checked
    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """`get` for each key, in order."""
        return [self.get(key) for key in keys]

    @checked  # noqa: B027
    def enter(self, namespace: bytes) -> None:
        """This process uses the dataset: its samples are not dropped for another's."""

    @checked  # noqa: B027
    def leave(self, namespace: bytes) -> None:
        """This process no longer uses the dataset."""

    def flush(self) -> None:  # noqa: B027
        """Bring what was put to where it outlives this machine, if the store can."""

    def close(self) -> None:  # noqa: B027
        """Flush and let go; opens by itself when used again."""

    def __enter__(self: Opened) -> Opened:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
