"""Counts of the events of a cache in a process and all its loader workers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from ..locks import ThreadLock

COUNTED = ("hits", "misses", "bytes_read", "bytes_written", "not_stored", "corrupt", "errors")
ROWS = 1021  # each process counts in its own row, chosen by process id, so that no increment is lost


@dataclass(frozen=True)
class CacheReport:
    """The counts of this process and its loader workers since the cache was made.

    A sample counts at most once per read as corrupt, and at most once as an error.

    Attributes:
        hits: samples read from the store.
        misses: samples computed.
        bytes_read, bytes_written: bytes of encoded samples.
        not_stored: samples that a full store did not take.
        corrupt: samples computed again because the stored bytes were damaged.
        errors: samples computed because the store failed.
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
    """A table of counts in shared memory, one row per process, for forked and spawned loader workers."""

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
        """Add to the counts of these names."""
        with self._lock:
            row = self._counts[os.getpid() % ROWS]
            for name, amount in amounts.items():
                row[COUNTED.index(name)] += amount

    def report(self) -> CacheReport:
        """Return the sums over all processes."""
        return CacheReport(*self._counts.sum(axis=0).tolist())
