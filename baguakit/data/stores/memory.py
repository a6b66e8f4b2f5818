"""A store in the memory of one process."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

from ...arguments import integer
from ..locks import KeyedLocks, ThreadLock
from .base import DATASET, Store, StoreStats


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
