"""A dataset whose samples are computed once and shared by all ranks and loader workers that read its store."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence, Sized
from types import TracebackType
from typing import Any, TypeVar, cast

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..arguments import text
from .codec import Codec, Corrupt, Plain
from .counters import CacheReport, Counters
from .identity import namespace, position
from .stores.base import Store, StoreError

T = TypeVar("T")


class CachedDataset(Dataset[Any]):
    """`dataset`, each sample of which is computed by whoever needs it first, and read from `store` by all others.

    Cache what is slow and always the same (reading, decoding, resizing, tokenising); random augmentation belongs behind
    the cache, or every epoch sees the same. A sample read from the store is a copy: changing it changes nothing.

        store      MemoryStore(), LMDBStore(path), RedisStore(hosts), or your own Store
        name       what the samples are; by default a hash of all that the dataset holds, read once, here. Give one
                   where that is large, cannot be pickled, or is not equal on all ranks (sets of strings)
        version    change it with the dataset's code: samples of another version are never read
        codec      Plain(): tensors, arrays, bytes and plain containers, and reading runs nothing;
                   Pickle(): any sample, from a store that nobody else can write to

    A store that is broken, full, or holds a damaged sample costs time, never a wrong sample: the sample is recomputed,
    `report()` counts it and the first of each kind is warned of. Raises TypeError for a sample the codec does not
    store and for an iterable dataset, ValueError for a dataset that needs a name.
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
            raise TypeError(f"{type(dataset).__name__} has no samples by index; cache a map-style dataset")
        if not isinstance(store, Store):
            raise TypeError(f"store is a {type(store).__name__}; give LMDBStore(path), RedisStore(…) or MemoryStore()")
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
        key, told = self._key(index), set[str]()
        found = self._read(key, told)
        if found is None:
            found = self._computed(key, index, told)
        return found[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Several samples, asked of the store at once."""
        keys = [self._key(index) for index in indices]
        away = set[str]()
        values = self._tried(self.store.get_many, keys, told=away, samples=len(keys)) or [None] * len(keys)
        told = [away.copy() for _ in keys]
        found = [self._decoded(value, mine) for value, mine in zip(values, told, strict=True)]
        each = zip(keys, indices, found, told, strict=True)
        return [(hit or self._computed(key, index, mine))[0] for key, index, hit, mine in each]

    def _key(self, index: Any) -> bytes:
        return self.namespace + position(index, len(self) if hasattr(self.dataset, "__len__") else None)

    def _computed(self, key: bytes, index: Any, told: set[str]) -> tuple[Any]:
        """The sample, by us, or by another while we waited for its claim. What was `told` of it is not told again."""
        with self.store.claim(key):
            found = self._read(key, told)
            if found is not None:
                return found
            self._check_worker()
            sample = self.dataset[index]
            self._count(misses=1)
            self._keep(key, index, sample, told)
            return (sample,)

    def _check_worker(self) -> None:
        if self.store.shared or self._private or get_worker_info() is None:
            return
        self._private = True
        text = f"{self.store!r} is of one process: each loader worker fills its own; LMDBStore(path) is shared by all"
        warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _read(self, key: bytes, told: set[str]) -> tuple[Any] | None:
        """The stored sample in a tuple (None is a sample like any other), or None."""
        return self._decoded(self._tried(self.store.get, key, told=told), told)

    def _decoded(self, value: bytes | None, told: set[str]) -> tuple[Any] | None:
        if value is None:
            return None
        try:
            sample = self.codec.decode(value)
        except Corrupt as error:
            self._warn("corrupt", f"{self.store!r} holds a damaged sample, which is computed again: {error}", told)
            return None
        self._count(hits=1, bytes_read=len(value))
        return (sample,)

    def _keep(self, key: bytes, index: Any, sample: Any, told: set[str]) -> None:
        try:
            value = self.codec.encode(sample)
        except TypeError as error:
            raise TypeError(f"sample {index!r} of {type(self.dataset).__name__} cannot be cached: {error}") from error
        kept = self._tried(self.store.put, key, value, told=told)
        if kept:
            self._count(bytes_written=len(value))
        elif kept is False:
            self._warn("not_stored", f"{self.store!r} is full; what it does not hold is computed in every epoch", told)

    def _tried(self, call: Callable[..., T], *args: Any, told: set[str] | None = None, samples: int = 1) -> T | None:
        try:
            return call(*args)
        except StoreError as error:
            told = set() if told is None else told
            self._warn("errors", f"{error}; samples are computed without the cache", told, samples)
            return None

    def _warn(self, kind: str, text: str, told: set[str], samples: int = 1) -> None:
        """Count a trouble, unless it is `told` of these samples already; warn of the first of its kind."""
        if kind in told:
            return
        told.add(kind)
        first = getattr(self._counters.report(), kind) == 0
        self._count(**{kind: samples})
        if first:
            warnings.warn(text, RuntimeWarning, stacklevel=4)

    def _count(self, **amounts: int) -> None:
        self._counters.add(**amounts)

    def report(self) -> CacheReport:
        """Hits, misses, bytes and troubles of this process and its loader workers. Local."""
        return self._counters.report()

    def clear(self) -> None:
        """Drop this dataset's samples from the store."""
        self._tried(self.store.clear, self.namespace)

    def close(self) -> None:
        """Flush the store, which stays open for others; this dataset's samples may be dropped when it is full."""
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
        raise TypeError(f"codec is Plain(), Pickle(), or your own with tag, encode and decode, not {given!r}")
    return cast(Codec, codec)


def _leave(store: Store, dataset: bytes) -> None:
    store.leave(dataset)
