"""Stores of cached samples: bytes by key, within a limit; that in the memory of a process; and the locks of stores."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import stat
import tempfile
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

from ..arguments import Doors, checked, integer

Opened = TypeVar("Opened", bound="Store")
DATASET = 16  # bytes of a key that identify its dataset


class StoreError(RuntimeError):
    """An error of a store; samples are computed without it."""


@dataclass(frozen=True)
class StoreStats:
    """The contents of a store: `entries` samples of all datasets take `bytes` of `capacity` bytes (None: no limit)."""

    entries: int
    bytes: int
    capacity: int | None


class Store(Doors, ABC):
    """The base of stores: bytes by key. The first 16 bytes of a key identify the dataset.

    Methods raise StoreError only. They are thread-safe. A store can be passed to forked and spawned processes, each of
    which opens it again.

    Attributes:
        shared: whether all processes see the same samples.
    """

    doors: ClassVar[frozenset[str]] = frozenset({"get", "put", "claim", "clear", "get_many", "enter", "leave"})
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

    @checked
    def enter(self, namespace: bytes) -> None:
        """Register that this process uses the dataset: its samples are not deleted to store others."""

    @checked
    def leave(self, namespace: bytes) -> None:
        """Register that this process no longer uses the dataset."""

    def flush(self) -> None:
        """Write the samples to persistent storage, if the store has any."""

    def close(self) -> None:
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


# Locks between threads and between the processes of a node, and the files that these share


class ThreadLock:
    """A lock that is free in a forked child, even if a thread of the parent held it.

    It is reentrant, since the garbage collector may run a finalizer in the thread that holds it.
    """

    def __init__(self) -> None:
        self._of = (os.getpid(), threading.RLock())

    def __enter__(self) -> None:
        if self._of[0] != os.getpid():
            self._of = (os.getpid(), threading.RLock())
        self._of[1].acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._of[1].release()


class KeyedLocks:
    """One lock per key between the threads of a process; unused keys take no memory."""

    def __init__(self) -> None:
        self._guard, self._locks = ThreadLock(), WeakValueDictionary[bytes, ThreadLock]()

    @contextmanager
    def hold(self, key: bytes) -> Iterator[None]:
        """Hold the lock of this key."""
        with self._guard:
            lock = self._locks.setdefault(key, ThreadLock())
        with lock:
            yield


def byte_of(area: int, key: bytes = b"") -> int:
    """Return the byte that stands for a key in an area, 0 to 3, of a file of locks; two keys rarely share one."""
    return (area << 60) + (int.from_bytes(blake2b(key, digest_size=8).digest(), "big") & ((1 << 60) - 1))


class ByteLocks:
    """Locks between processes: the bytes 0 … 2**62 of the file `path`, released by the kernel when the process ends.

    POSIX record locks belong to a process: a forked child does not inherit them, and closing any descriptor of the file
    releases all locks of the process. Each process therefore opens the file, which is created if missing, once.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a+b", opener=partial(os.open, mode=0o600))  # noqa: SIM115

    def take(self, number: int, shared: bool = False, wait: bool = True) -> bool:
        """Lock a byte; return False if another process holds it (without `wait`), or if waiting would deadlock."""
        how = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.lockf(self._file, how, 1, number)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK, errno.ENOLCK):
                return False
            raise
        return True

    def free(self, number: int) -> None:
        """Release a byte."""
        with suppress(ValueError):  # the file was closed, which released it
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    @contextmanager
    def held(self, number: int) -> Iterator[None]:
        """Hold the lock of a byte, unless waiting for it would deadlock."""
        taken = self.take(number)
        try:
            yield
        finally:
            if taken:
                self.free(number)

    def close(self) -> None:
        """Release all bytes, and close the file."""
        self._file.close()


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file at `path` atomically, by a synced temporary file; raise OSError if that fails."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def others_may_write(path: Path, names: Iterable[str]) -> str:
    """Return an error text if other users may write to the directory `path` or to these files in it, else "".

    The superuser may always, and is ignored, as are missing files.
    """
    for place in (path, *(path / name for name in names)):
        try:
            found = place.stat()
        except FileNotFoundError:
            continue
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            who = f"it is user {found.st_uid}'s and its mode is {stat.S_IMODE(found.st_mode):04o}"
            return (
                f"{place} can be written by others ({who}), who could add data that this process would read or run;"
                f" pass a directory of your own, or empty {path}, chown it to user {os.geteuid()} and chmod it to 0700"
            )
    return ""


def file_system(path: Path) -> str:
    """Return the kind of file system of `path`; "" if it is unknown."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    found = [(len(mount[1]), i, mount[2]) for i, mount in enumerate(mounts) if path.is_relative_to(mount[1])]
    return max(found)[2] if found else ""


# The store in memory


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
