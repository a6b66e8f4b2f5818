"""A store in one memory-mapped file per node.

Commits are not synced to disk: the kernel has the commits of a killed process, but after a crash of the machine the
file may be inconsistent. `state.json` in the directory therefore holds the boot of the latest write, and whether all is
on disk (`clean`). It changes under LMDB's lock of writers: a process that writes first marks the file as not clean, and
one that closes it syncs it and marks it as clean. A file of another boot that is not clean is emptied.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..arguments import integer, message, text
from .stores import (
    DATASET,
    ByteLocks,
    KeyedLocks,
    Store,
    StoreError,
    StoreStats,
    ThreadLock,
    byte_of,
    file_system,
    others_may_write,
    package,
    replace_file,
)

if TYPE_CHECKING:
    import lmdb

SPARE = 1 << 20  # bytes of the disk that stay free
KEY = 511  # bytes: LMDB takes no longer keys
BATCH = 4096  # samples deleted in one transaction
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "afs", "glusterfs"}
OPENING, DATASETS, CLAIMS = 0, 1, 2  # areas of the file of locks
FILES = ("data.mdb", "lock.mdb", "locks", "state.json")
READERS = 4096  # the most processes × threads that read at the same time

_environments: dict[Path, Environment] = {}
_guard = ThreadLock()
_writing = ThreadLock()  # held while this process writes or forks, so that no child inherits an open transaction


def _forked() -> None:
    """Close in a forked child the parent's environments, before the child takes its own locks."""
    while _environments:
        _environments.popitem()[1].abandon()


os.register_at_fork(
    before=_writing.__enter__, after_in_parent=partial(_writing.__exit__, None, None, None), after_in_child=_forked
)


class LMDBStore(Store):
    """A store in a directory on a disk of this node (or in its shared memory), for all processes of the node.

    If a process is killed, the store stays readable, and the locks of the process are released. After a crash of the
    machine the store is empty, unless it had been closed. A full store deletes the samples of datasets that no process
    uses. After that it keeps its samples and takes no new ones: an epoch reads each sample once, so the least recently
    used sample is the next to be needed.

    Args:
        path: a directory for this store alone, not on a network file system; created if missing, with access for its
            owner only.
        capacity_bytes: the limit, in bytes of samples with the pages that hold them, equal in all processes; the file
            may be larger by an eighth and 16 MiB.

    Raises:
        ValueError: `path` is on a network file system; other users may write to it (this process would read their
            data, and run it with `codec=Pickle()`); or it has an LMDB file that is not a store of samples.
    """

    def __init__(self, path: str | os.PathLike[str], capacity_bytes: int = 64 << 30) -> None:
        if not isinstance(path, (str, Path)) and not hasattr(path, "__fspath__"):
            raise TypeError(f"path is a directory, not {path!r}")
        most = 1 << 46  # as much as a process can map
        self.capacity_bytes = integer("capacity_bytes", capacity_bytes, 1 << 20, most)
        self.path = path = Path(text("path", os.fspath(path))).expanduser().resolve()
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; pass a directory for this LMDBStore alone")
        if problem := others_may_write(path, FILES):
            raise ValueError(problem)
        if (path / "data.mdb").exists() and read_state(path) is None:
            raise ValueError(f"{path} holds an LMDB file that is not a store of samples; pass another directory")
        kind = file_system(path)
        if kind in NETWORK or kind.startswith("fuse."):
            raise ValueError(
                f"{path} is on {kind}, where memory maps of several nodes conflict; pass a local directory"
            )
        self._start(Counter())

    def _start(self, datasets: Counter[bytes]) -> None:
        self._lmdb, self._datasets, self._user = package("lmdb", "LMDBStore"), datasets, object()
        weakref.finalize(self, _leave, self.path, self._user)

    def __repr__(self) -> str:
        return f"LMDBStore({str(self.path)!r}, capacity_bytes={self.capacity_bytes})"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "capacity_bytes": self.capacity_bytes, "datasets": self._datasets.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.capacity_bytes = state["path"], state["capacity_bytes"]
        self._start(state["datasets"])

    def _environment(self) -> Environment:
        """Return this process's environment, open until all its users leave it; raise StoreError if that fails."""
        with _guard:
            environment = _environments.get(self.path)
            if environment is None:
                size = self.capacity_bytes + self.capacity_bytes // 8 + (16 << 20)
                environment = _environments[self.path] = Environment(self.path, size)
            if self._user not in environment.users:
                environment.users[self._user] = self._datasets
                environment.settle()
            return environment

    @contextmanager
    def _transaction(self, write: bool = False) -> Iterator[lmdb.Transaction[bytes]]:
        environment = self._environment()
        try:
            with _writing if write else nullcontext(), environment.env.begin(write=write) as transaction:
                if write:
                    environment.mark(clean=False)
                yield transaction
        except self._lmdb.MapResizedError:
            larger = "is open elsewhere with a larger capacity_bytes; pass the same everywhere"
            raise StoreError(f"{self!r} {larger}") from None
        except (self._lmdb.Error, OSError) as error:
            raise StoreError(f"the LMDB store at {self.path} failed: {error}") from error

    def get(self, key: bytes) -> bytes | None:
        with self._transaction() as transaction:
            return transaction.get(held(key))

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._transaction() as transaction:
            return [transaction.get(held(key)) for key in keys]

    def put(self, key: bytes, value: bytes) -> bool:
        return self._written(key, value) or (self._drop_idle() and self._written(key, value))

    def _written(self, key: bytes, value: bytes) -> bool:
        try:
            with self._transaction(write=True) as transaction:
                counts = transaction.stat()
                more = len(value) + 3 * counts["psize"]
                if _used(counts) + more > self.capacity_bytes or shutil.disk_usage(self.path).free < more + SPARE:
                    return False
                return transaction.put(held(key), value)
        except StoreError as error:
            full = (self._lmdb.MapFullError, self._lmdb.TxnFullError, self._lmdb.DiskError)
            if isinstance(error.__cause__, full) or shutil.disk_usage(self.path).free < len(value) + SPARE:
                return False
            raise

    def _drop_idle(self) -> bool:
        """Delete the samples of datasets that no process uses; return whether there were any."""
        environment, idle = self._environment(), list[bytes]()
        with self._transaction() as transaction:
            cursor = transaction.cursor()
            found = cursor.first()
            while found:
                dataset = cursor.key()[:DATASET]
                if environment.is_idle(dataset):
                    idle.append(dataset)
                found = cursor.set_range(dataset + b"\xff" * 32)
        for dataset in idle:
            self.clear(dataset)
        return bool(idle)

    @contextmanager
    def claim(self, key: bytes) -> Iterator[None]:
        with ExitStack() as stack:
            with suppress(StoreError, OSError):
                stack.enter_context(self._environment().claim(key))
            yield

    def stats(self) -> StoreStats:
        with self._transaction() as transaction:
            counts = transaction.stat()
        return StoreStats(counts["entries"], _used(counts), self.capacity_bytes)

    def clear(self, namespace: bytes = b"") -> None:
        left = True
        while left:
            with self._transaction(write=True) as transaction:
                cursor = transaction.cursor()
                left = cursor.set_range(namespace) if namespace else cursor.first()
                for _ in range(BATCH):
                    left = left and cursor.key().startswith(namespace)
                    if not left:
                        break
                    left = cursor.delete() and bool(cursor.key())

    def enter(self, namespace: bytes) -> None:
        self._count(namespace, 1)

    def leave(self, namespace: bytes) -> None:
        self._count(namespace, -1)

    def _count(self, namespace: bytes, more: int) -> None:
        with _guard:
            self._datasets[namespace] += more
            if environment := _environments.get(self.path):
                environment.settle()

    def flush(self) -> None:
        self._environment().flush()

    def close(self) -> None:
        """Sync all writes to disk, mark the store as clean, and release it."""
        try:
            if read_state(self.path) is not None:
                self._environment()
        except StoreError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        _leave(self.path, self._user)


class Environment:
    """An LMDB environment, which a process may open once only, its locks, and the datasets that this process uses.

    Attributes:
        users: the stores that use it, with the datasets of each.
    """

    def __init__(self, path: Path, map_size: int) -> None:
        self.path, self.users, self._used = path, dict[object, Counter[bytes]](), set[bytes]()
        self._lmdb, self._claims = package("lmdb", "LMDBStore"), KeyedLocks()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if problem := others_may_write(path, FILES):
                raise StoreError(problem)
            self._locks = ByteLocks(path / "locks")
            with ExitStack() as failed:
                failed.callback(self._locks.close)
                with self._locks.held(byte_of(OPENING)):
                    self.env = self._open(map_size)
                failed.pop_all()
        except (OSError, self._lmdb.Error) as error:
            raise StoreError(f"the LMDB store at {path} cannot be opened: {error}") from error

    def _open(self, map_size: int) -> lmdb.Environment:
        state = read_state(self.path)
        if state is None or (state.get("boot") != boot_id() and not state.get("clean")):
            if state is not None:
                self._empty("the machine crashed while it was open")
            self._write_state(clean=False)
        try:
            env = self._open_as_it_is(map_size)
            # The file must hold as many pages as the environment counts.
            size = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
            if (self.path / "data.mdb").stat().st_size >= size or env.stat()["entries"] == 0:
                return env
            env.close()
            reason = "its file was truncated"
        except (self._lmdb.InvalidError, self._lmdb.CorruptedError, self._lmdb.VersionMismatchError) as error:
            reason = f"it cannot be read: {error}"
        self._empty(reason)
        return self._open_as_it_is(map_size)

    def _open_as_it_is(self, map_size: int) -> lmdb.Environment:
        settings = {"metasync": False, "readahead": False, "max_readers": READERS, "sync": boot_id() is None}
        env: lmdb.Environment = self._lmdb.open(str(self.path), map_size=map_size, mode=0o600, **settings)
        env.reader_check()
        return env

    def _empty(self, reason: str) -> None:
        for name in ("data.mdb", "lock.mdb"):
            (self.path / name).unlink(missing_ok=True)
        warnings.warn(f"the LMDB store at {self.path} is emptied: {reason}", RuntimeWarning, stacklevel=2)

    def _write_state(self, clean: bool) -> None:
        replace_file(self.path / "state.json", json.dumps({"format": 1, "boot": boot_id(), "clean": clean}).encode())

    def mark(self, clean: bool) -> None:
        """Write whether all is on disk, unless the file says so; in a transaction that writes."""
        if (read_state(self.path) or {}).get("clean") is not clean:
            self._write_state(clean)

    def flush(self) -> None:
        """Sync to disk what all processes have written, and mark the file as clean."""
        try:
            with _writing, self.env.begin(write=True):
                self.env.sync(True)
                self.mark(clean=True)
        except (OSError, self._lmdb.Error) as error:
            raise StoreError(f"the LMDB store at {self.path} cannot be flushed: {error}") from error

    def close(self) -> None:
        """Flush and close."""
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close as it is."""
        self._locks.close()
        self.env.close()

    @contextmanager
    def claim(self, key: bytes) -> Iterator[None]:
        """Hold the lock of `key` among all processes and threads of the node."""
        with self._claims.hold(key), self._locks.held(byte_of(CLAIMS, key)):
            yield

    def settle(self) -> None:
        """Hold the locks of the datasets that a store of this process uses, and no others."""
        used = {dataset for datasets in self.users.values() for dataset, count in datasets.items() if count > 0}
        for dataset in used - self._used:
            self._locks.take(byte_of(DATASETS, dataset), shared=True)
        for dataset in self._used - used:
            self._locks.free(byte_of(DATASETS, dataset))
        self._used = used

    def is_idle(self, dataset: bytes) -> bool:
        """Return whether no process uses the dataset."""
        number = byte_of(DATASETS, dataset)
        if dataset in self._used or not self._locks.take(number, wait=False):
            return False
        self._locks.free(number)
        return True


def held(key: bytes) -> bytes:
    """Return a key if LMDB can hold it; else raise a ValueError."""
    if not 0 < len(key) <= KEY:
        raise ValueError(message("key", f"1 to {KEY} bytes", key))
    return key


def boot_id() -> str | None:
    """Return the identity of this boot of the machine; None if it is unknown: then commits are synced."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the content of `state.json`; None if the directory holds no store."""
    try:
        state = json.loads((path / "state.json").read_bytes())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _leave(path: Path, user: object) -> None:
    """Remove a user of this process's environment at `path`; sync and close it after the last."""
    with _guard:
        environment = _environments.get(path)
        if environment is None:
            return
        environment.users.pop(user, None)
        if environment.users:
            environment.settle()
            return
        del _environments[path]
        try:
            environment.close()
        except StoreError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def _used(counts: Any) -> int:
    """Return the bytes of the pages that hold samples."""
    return int((counts["branch_pages"] + counts["leaf_pages"] + counts["overflow_pages"]) * counts["psize"])
