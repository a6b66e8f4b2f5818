"""Samples in the memory of one process."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

from ...arguments import whole
from ..locks import KeyedLocks, ThreadLock
from .base import Store, StoreStats

DATASET = 16  # bytes of a key that name its dataset


class MemoryStore(Store):
    """Samples in this process: for data read without loader workers (each worker would keep its own).

    A full store drops the samples of datasets that no open cache uses, then keeps what it has and takes no more:
    epochs sweep over a dataset, so the least recently used sample is the next to be needed.

        capacity_bytes   of encoded samples; None for no limit

    Raises ValueError for a capacity of less than 1, TypeError for one that is no whole number.
    """

    shared = False

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = None if capacity_bytes is None else whole("capacity_bytes", capacity_bytes, 1)
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
