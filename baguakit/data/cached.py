"""A dataset whose samples are computed once and shared by all processes that use its store."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..arguments import text
from .codec import Codec, Corrupt, Plain
from .identity import namespace, position
from .locks import ThreadLock
from .stores import Store, StoreError

T = TypeVar("T")
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


class CachedDataset(Dataset[Any]):
    """A cache of `dataset`: the first process that needs a sample computes it, and all others read it from `store`.

    Cache deterministic, slow work (reading, decoding, resizing, tokenising). Apply random augmentation after the cache,
    otherwise every epoch has the same. A sample read from the store is a copy.

    If the store fails, is full or holds a damaged sample, the sample is computed again: this costs time, but is never
    wrong. `report()` counts such samples, and the first of each kind raises a warning.

    Args:
        dataset: a map-style dataset.
        store: `MemoryStore()`, `LMDBStore(path)`, `RedisStore(hosts)`, or your own `Store`.
        name: the name of the samples; None for a hash of the dataset's content, computed once, here. Pass a name if the
            content is large, cannot be pickled, or differs between ranks (sets of strings).
        version: change it with the dataset's code: samples of other versions are never read.
        codec: `Plain()`, the default: tensors, arrays, bytes and plain containers, decoded without running code.
            `Pickle()`: any sample, from a store to which nobody else can write.

    Raises:
        TypeError: the dataset has no samples by index; or, when a sample is read, the codec cannot store it.
        ValueError: the content of the dataset cannot be hashed, and there is no name.
    """

    def __init__(
        self,
        dataset: Any,
        store: Store,
        name: str | None = None,
        version: str | int = 0,
        codec: Codec | None = None,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"{type(dataset).__name__} has no samples by index; pass a map-style dataset")
        if not isinstance(store, Store):
            raise TypeError(f"store is LMDBStore(path), RedisStore(…) or MemoryStore(), not a {type(store).__name__}")
        if isinstance(version, bool) or not isinstance(version, (str, int)):
            raise TypeError(f"version is a string or a whole number, not {version!r}")
        self.name = None if name is None else text("name", name)
        self.codec: Codec = _codec(codec)
        self.dataset, self.store, self.version = dataset, store, version
        self.namespace = namespace(dataset, name, version, self.codec.tag)
        self._counters, self._private = Counters(), False
        self._enter()

    def _enter(self) -> None:
        self._tried(self.store.enter, self.namespace)
        self._leaving = weakref.finalize(self, _leave, self.store, self.namespace)
        self._leaving.atexit = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_leaving"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._enter()

    def cache_identity(self) -> str:
        """Return the identity of the cached samples, for a cache of this cache."""
        return self.namespace.hex()

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return several samples, with one call of the store for all of them."""
        keys = [self._key(index) for index in indices]
        failed = set[str]()
        values = self._tried(self.store.get_many, keys, counted=failed, samples=len(keys)) or [None] * len(keys)
        counted = [failed.copy() for _ in keys]
        found = [self._decoded(value, mine) for value, mine in zip(values, counted, strict=True)]
        each = zip(keys, indices, found, counted, strict=True)
        return [(hit or self._computed(key, index, mine))[0] for key, index, hit, mine in each]

    def _key(self, index: Any) -> bytes:
        return self.namespace + position(index, len(self) if hasattr(self.dataset, "__len__") else None)

    def _computed(self, key: bytes, index: Any, counted: set[str]) -> tuple[Any]:
        """Compute and store the sample, or read it if another process computed it while this one waited for the claim.

        `counted` holds the kinds of failures that have been counted for the sample: each counts once.
        """
        with self.store.claim(key):
            found = self._decoded(self._tried(self.store.get, key, counted=counted), counted)
            if found is not None:
                return found
            self._check_worker()
            sample = self.dataset[index]
            self._counters.add(misses=1)
            self._keep(key, index, sample, counted)
            return (sample,)

    def _check_worker(self) -> None:
        if self.store.shared or self._private or get_worker_info() is None:
            return
        self._private = True
        text = f"{self.store!r} is not shared: each loader worker fills its own; LMDBStore(path) is shared by all"
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _decoded(self, value: bytes | None, counted: set[str]) -> tuple[Any] | None:
        """Return the stored sample in a tuple (a sample may be None), or None if there is none."""
        if value is None:
            return None
        try:
            sample = self.codec.decode(value)
        except Corrupt as error:
            self._warn("corrupt", f"{self.store!r} holds a damaged sample, which is computed again: {error}", counted)
            return None
        self._counters.add(hits=1, bytes_read=len(value))
        return (sample,)

    def _keep(self, key: bytes, index: Any, sample: Any, counted: set[str]) -> None:
        try:
            value = self.codec.encode(sample)
        except TypeError as error:
            raise TypeError(f"sample {index!r} of {type(self.dataset).__name__} cannot be cached: {error}") from error
        kept = self._tried(self.store.put, key, value, counted=counted)
        if kept:
            self._counters.add(bytes_written=len(value))
        elif kept is False:
            self._warn("not_stored", f"{self.store!r} is full; samples beyond are computed in every epoch", counted)

    def _tried(self, call: Callable[..., T], *args: Any, counted: set[str] | None = None, samples: int = 1) -> T | None:
        """Return the result of a call of the store; None, with a warning, if the store fails."""
        try:
            return call(*args)
        except StoreError as error:
            counted = set() if counted is None else counted
            self._warn("errors", f"{error}; samples are computed without the cache", counted, samples)
            return None

    def _warn(self, kind: str, text: str, counted: set[str], samples: int = 1) -> None:
        """Count a failure, unless it is in `counted`, and warn of the first of its kind."""
        if kind in counted:
            return
        counted.add(kind)
        first = getattr(self._counters.report(), kind) == 0
        self._counters.add(**{kind: samples})
        if first:
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def report(self) -> CacheReport:
        """Return the hits, misses, bytes and failures of this process and its loader workers. Local."""
        return self._counters.report()

    def clear(self) -> None:
        """Delete this dataset's samples from the store."""
        self._tried(self.store.clear, self.namespace)

    def close(self) -> None:
        """Flush the store, which stays open for others; when it is full, it may delete this dataset's samples."""
        self._tried(self.store.flush)
        self._leaving()

    def __enter__(self) -> CachedDataset:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _codec(given: Any) -> Codec:
    codec = Plain() if given is None else given
    able = callable(getattr(codec, "encode", None)) and callable(getattr(codec, "decode", None))
    if isinstance(codec, type) or not able or not isinstance(getattr(codec, "tag", None), str):
        raise TypeError(f"codec is Plain(), Pickle(), or an object with tag, encode and decode, not {given!r}")
    return cast(Codec, codec)


def _leave(store: Store, dataset: bytes) -> None:
    store.leave(dataset)
