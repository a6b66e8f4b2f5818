"""The events of a cache, counted by all loader workers of a process together."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from .locks import ThreadLock

COUNTED = ("hits", "misses", "bytes_read", "bytes_written", "not_stored", "corrupt", "errors")
ROWS = 1021  # processes count in rows of their own, by process id, so that no addition is lost


@dataclass(frozen=True)
class CacheReport:
    """Counts of this process and its loader workers since the cache was made.

    `hits` samples were read and `misses` computed; `not_stored` of them found the store full; of `corrupt` ones the
    store held something damaged, and for `errors` of them it was broken: both were recomputed, and count a sample once
    each time it is asked for, however often the store is asked. `bytes_read` and `bytes_written` are those of encoded
    samples.
    """

    hits: int
    misses: int
    bytes_read: int
    bytes_written: int
    not_stored: int
    corrupt: int
    errors: int

    @property
    def hit_rate(self) -> float:
        """Hits over reads; 0.0 before the first read."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        return (
            f"{self.hit_rate:.1%} of {self.hits + self.misses} samples from the cache"
            f" ({self.bytes_read / 1e6:.1f} MB read, {self.bytes_written / 1e6:.1f} MB written),"
            f" {self.not_stored} not stored, {self.corrupt} corrupt, {self.errors} store errors"
        )


class Counters:
    """A table of counts in shared memory, one row per process; goes to forked and spawned loader workers."""

    def __init__(self) -> None:
        self._table = torch.zeros(ROWS, len(COUNTED), dtype=torch.int64).share_memory_()
        self._open()

    def _open(self) -> None:
        self._counts, self._lock = self._table.numpy(), ThreadLock()

    def __getstate__(self) -> dict[str, Any]:
        return {"_table": self._table}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def add(self, **amounts: int) -> None:
        with self._lock:
            row = self._counts[os.getpid() % ROWS]
            for name, amount in amounts.items():
                row[COUNTED.index(name)] += amount

    def report(self) -> CacheReport:
        return CacheReport(*self._counts.sum(axis=0).tolist())
