"""Cache the samples of a dataset in a store that processes share, and make the keys of the samples in the store."""

import pickle
import warnings
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, fields
from hashlib import blake2b
from threading import get_native_id
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..arguments import instance, kind_of, text
from ..tensors import bytes_of, plain
from .codec import Codec, Corrupt, Pickle, Plain
from .stores import Store, StoreError

T = TypeVar("T")
ROWS = 1021  # rows of counts; a thread's native id chooses its row
MISSING = object()  # in place of a sample, which may be None


@dataclass(frozen=True)
class CacheReport:
    """The counts of this process and its loader workers since the `CachedDataset` was made.

    Attributes:
        hits, misses: samples read from the store, and samples computed.
        bytes_read, bytes_written: bytes of encoded samples.
        not_stored: samples that a full store did not take.
        corrupt: samples whose stored bytes were damaged.
        errors: calls of the store that failed.
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
        """Return hits / (hits + misses); 0.0 before the first read."""
        return self.hits / max(1, self.hits + self.misses)

    def __str__(self) -> str:
        return (
            f"{self.hit_rate:.1%} of {self.hits + self.misses} samples from the cache"
            f" ({self.bytes_read / 1e6:.1f} MB read, {self.bytes_written / 1e6:.1f} MB written),"
            f" {self.not_stored} not stored, {self.corrupt} corrupt, {self.errors} store errors"
        )


COUNTED = [each.name for each in fields(CacheReport)]


class CachedDataset(Dataset[Any]):
    """A cache of `dataset`: the first process that needs a sample computes it; other processes read it from `store`.

    Cache deterministic, slow work (reading, decoding, resizing, tokenising). Apply random augmentation after the cache,
    otherwise every epoch has the same augmentation. A sample read from the store is a copy.

    If the store fails, is full or holds damaged bytes, the sample is computed again. This costs time, but the sample is
    correct. `report()` counts these cases. A RuntimeWarning reports the first case of each kind.

    Args:
        dataset: a map-style dataset.
        store: `MemoryStore()`, `LMDBStore(path)`, `RedisStore(hosts)`, or your own `Store`.
        name: the name of the dataset in the store; None for a hash of the dataset's content, computed once. Pass
            a name if the content is large, cannot be pickled (lambdas), or differs between ranks (sets of strings).
        version: change it whenever the dataset's code changes; samples of other versions are never read.
        codec: `Plain()`, the default, stores tensors, arrays, bytes and plain containers. It runs no code when it
            decodes. `Pickle()` stores any sample; use it only if nobody else can write to the store.

    Raises:
        TypeError: the dataset is not map-style; or, when a sample is read, the codec cannot encode the sample.
        ValueError: `name` is None, and the content of the dataset cannot be hashed.
    """

    def __init__(
        self, dataset: Any, store: Store, name: str | None = None, version: str | int = 0, codec: Codec | None = None
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise TypeError(f"{type(dataset).__name__} has no samples by index; pass a map-style dataset")
        if not isinstance(store, Store):
            raise TypeError(f"store is LMDBStore(path), RedisStore(…) or MemoryStore(), not a {type(store).__name__}")
        self.version: str | int = kind_of(str | int).take("version", version)
        self.name = None if name is None else text("name", name)
        self.codec = Plain() if codec is None else codec
        instance("codec", self.codec, (Plain, Pickle), "Plain() or Pickle()")
        self.dataset, self.store = dataset, store
        self.namespace = namespace(dataset, name, self.version, self.codec.tag)
        # Loader workers share these counts. Each thread adds to the row of its id, so that hardly any addition is lost.
        self._counts = torch.zeros(ROWS, len(COUNTED), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: Any) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Return the samples at `indices`. One call of the store reads all samples that are stored."""
        length = len(self) if hasattr(self.dataset, "__len__") else None
        keys = [self.namespace + position(index, length) for index in indices]
        values = self._tried(self.store.get_many, keys) or [None] * len(keys)
        return [self._sample(*each) for each in zip(keys, indices, values, strict=True)]

    def _sample(self, key: bytes, index: Any, value: bytes | None) -> Any:
        """Return the sample: decode `value`, else what the store has now, else compute it."""
        sample = self._decoded(value)
        if sample is MISSING:
            with self.store.claim(key):
                again = self._tried(self.store.get, key)
                sample = MISSING if again == value else self._decoded(again)
                if sample is MISSING:
                    sample = self._computed(key, index)
        return sample

    def _decoded(self, value: bytes | None) -> Any:
        if value is None:
            return MISSING
        try:
            sample = self.codec.decode(value)
        except Corrupt as error:
            self._failed("corrupt", f"{self.store!r} holds a damaged sample, which is computed again: {error}")
            return MISSING
        self._count(hits=1, bytes_read=len(value))
        return sample

    def _computed(self, key: bytes, index: Any) -> Any:
        if not self.store.shared and get_worker_info() is not None:
            each = "is not shared: each loader worker fills its own; LMDBStore(path) is shared by all"
            warnings.warn(f"{self.store!r} {each}", RuntimeWarning, stacklevel=4)
        sample = self.dataset[index]
        self._count(misses=1)
        try:
            value = self.codec.encode(sample)
        except TypeError as error:
            raise TypeError(f"sample {index!r} of {type(self.dataset).__name__} cannot be cached: {error}") from error
        kept = self._tried(self.store.put, key, value)
        if kept:
            self._count(bytes_written=len(value))
        elif kept is False:
            full = "is full; samples beyond are computed in every epoch (its clear() makes room)"
            self._failed("not_stored", f"{self.store!r} {full}")
        return sample

    def _tried(self, call: Callable[..., T], *args: Any) -> T | None:
        """Return `call(*args)`; None if the store fails."""
        try:
            return call(*args)
        except StoreError as error:
            self._failed("errors", f"{error}; samples are computed without the cache")
            return None

    def _failed(self, kind: str, words: str) -> None:
        """Count a failure, and warn if it is the first of its kind."""
        first = getattr(self.report(), kind) == 0
        self._count(**{kind: 1})
        if first:
            warnings.warn(words, RuntimeWarning, stacklevel=4)

    def _count(self, **amounts: int) -> None:
        row = self._counts.numpy()[get_native_id() % ROWS]
        for name, amount in amounts.items():
            row[COUNTED.index(name)] += amount

    def report(self) -> CacheReport:
        """Return the hits, misses, bytes and failures of this process and its loader workers. This call is local."""
        return CacheReport(*self._counts.numpy().sum(axis=0).tolist())

    def clear(self) -> None:
        """Delete this dataset's samples from the store."""
        self._tried(self.store.clear, self.namespace)


# Keys of stored samples: 16 bytes that identify the dataset, then the index of the sample


def namespace(dataset: Any, name: str | None, version: str | int, codec_tag: str) -> bytes:
    """Return 16 bytes, equal in all processes, that identify the dataset's name (or content), version and codec.

    The content is the class name and a hash of the pickle. As a pickle has no code, change `version` when code changes.
    """
    what = f"name:{name}"
    if name is None:
        kind, content = type(dataset).__qualname__, blake2b(digest_size=16)
        try:
            _Hasher(SimpleNamespace(write=content.update), protocol=5).dump(dataset)
        except Exception as error:
            cause = f"the content of this {kind} cannot be hashed ({type(error).__name__}: {error})"
            raise ValueError(f"{cause}; pass name= (and version=, which you change with the transform)") from error
        what = f"content:{kind}:{content.hexdigest()}"
    text = "\0".join(["baguakit-1", codec_tag, f"{type(version).__name__}:{version}", what])
    return blake2b(text.encode(), digest_size=16).digest()


def position(index: Any, length: int | None) -> bytes:
    """Return a sample's key without the namespace. Raise TypeError or IndexError if `index` is invalid."""
    if isinstance(index, str):
        return b"s" + blake2b(index.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    try:
        number = index.__index__()
    except (AttributeError, TypeError):
        found = f"the {type(index).__name__} {index!r}"
        raise TypeError(f"the index of a cached sample is an integer or str, not {found}") from None
    if number < 0 and length is not None:
        number += length
    if not 0 <= number < 1 << 63:
        raise IndexError(f"index {index} is out of range for a dataset with {length} samples")
    return b"i" + int(number).to_bytes(8, "big")


class _Hasher(pickle.Pickler):
    """A pickler for hashing. It pickles tensors by value, without addresses, and a `CachedDataset` as its namespace."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout is torch.strided and not obj.is_quantized:
            return bytes, (bytes_of(plain(obj.detach().cpu())).numpy().tobytes(), str(obj.dtype), tuple(obj.shape))
        return (str, (obj.namespace.hex(),)) if isinstance(obj, CachedDataset) else NotImplemented
