"""A store in one memory-mapped file per node."""

from __future__ import annotations

import os
import shutil
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...arguments import integer, said, text
from ..files import others_may_write
from .base import DATASET, Store, StoreError, StoreStats
from .environment import FILES, Environment, import_lmdb, join_environment, leave_environment, read_state

if TYPE_CHECKING:
    import lmdb

SPARE = 1 << 20  # bytes of the disk that stay free
KEY = 511  # bytes: LMDB takes no longer keys
BATCH = 4096  # samples deleted in one transaction
NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "afs", "glusterfs"}


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
        self._lmdb = import_lmdb()
        if not isinstance(path, (str, Path)) and not hasattr(path, "__fspath__"):
            raise TypeError(f"path is a directory, not {path!r}")
        self.capacity_bytes = integer(
            "capacity_bytes", capacity_bytes, 1 << 20, 1 << 46
        )  # as much as a process can map
        self.path = Path(text("path", os.fspath(path))).expanduser().resolve()
        _check_directory(self.path)
        self._start(Counter())

    def _start(self, datasets: Counter[bytes]) -> None:
        self._datasets = datasets
        self._last: Environment | None = None  # the environment that has entered the datasets of this store
        self._user = object()
        weakref.finalize(self, _leave, self.path, self._user)

    def __repr__(self) -> str:
        return f"LMDBStore({str(self.path)!r}, capacity_bytes={self.capacity_bytes})"

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "capacity_bytes": self.capacity_bytes, "datasets": self._datasets.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lmdb = import_lmdb()
        self.path, self.capacity_bytes = state["path"], state["capacity_bytes"]
        self._start(state["datasets"])

    def _environment(self) -> Environment:
        size = self.capacity_bytes + self.capacity_bytes // 8 + (16 << 20)
        environment = join_environment(self.path, size, self._user)
        if environment is not self._last:
            self._last = environment
            for dataset in self._datasets:
                environment.enter(dataset)
        return environment

    @contextmanager
    def _transaction(self, write: bool = False) -> Iterator[lmdb.Transaction[bytes]]:
        try:
            with self._environment().env.begin(write=write) as transaction:
                yield transaction
        except self._lmdb.MapResizedError:
            raise StoreError(
                f"{self!r} is open elsewhere with a larger capacity_bytes; pass the same everywhere"
            ) from None
        except self._lmdb.Error as error:
            raise StoreError(f"the LMDB store at {self.path} failed: {error}") from error

    def get(self, key: bytes) -> bytes | None:
        with self._transaction() as transaction:
            return transaction.get(held(key))

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._transaction() as transaction:
            return [transaction.get(held(key)) for key in keys]

    def put(self, key: bytes, value: bytes) -> bool:
        with self._environment().writing:
            if self._written(key, value):
                return True
            return self._drop_idle() and self._written(key, value)

    def _written(self, key: bytes, value: bytes) -> bool:
        try:
            with self._transaction(write=True) as transaction:
                stat = transaction.stat()
                more = len(value) + 3 * stat["psize"]
                if _used(stat) + more > self.capacity_bytes or self._free() < more + SPARE:
                    return False
                return transaction.put(held(key), value)
        except StoreError as error:
            full = (self._lmdb.MapFullError, self._lmdb.TxnFullError, self._lmdb.DiskError)
            if isinstance(error.__cause__, full) or self._free() < len(value) + SPARE:
                return False
            raise

    def _free(self) -> int:
        return shutil.disk_usage(self.path).free

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
            self._drop(dataset)
        return bool(idle)

    def _drop(self, prefix: bytes) -> None:
        left = True
        while left:
            with self._transaction(write=True) as transaction:
                cursor = transaction.cursor()
                left = cursor.set_range(prefix) if prefix else cursor.first()
                for _ in range(BATCH):
                    left = left and cursor.key().startswith(prefix)
                    if not left:
                        break
                    left = cursor.delete() and bool(cursor.key())

    @contextmanager
    def claim(self, key: bytes) -> Iterator[None]:
        with ExitStack() as held:
            with suppress(StoreError, OSError):
                held.enter_context(self._environment().claim(key))
            yield

    def stats(self) -> StoreStats:
        with self._transaction() as transaction:
            stat = transaction.stat()
        return StoreStats(stat["entries"], _used(stat), self.capacity_bytes)

    def clear(self, namespace: bytes = b"") -> None:
        with self._environment().writing:
            self._drop(namespace)

    def enter(self, namespace: bytes) -> None:
        self._datasets[namespace] += 1
        if self._datasets[namespace] == 1 and self._last is not None:
            last = self._last
            if self._environment() is last:  # a new environment has entered all datasets already
                last.enter(namespace)

    def leave(self, namespace: bytes) -> None:
        self._datasets[namespace] -= 1
        if self._datasets[namespace] <= 0:
            del self._datasets[namespace]
            if self._last is not None and self._last.pid == os.getpid():
                self._last.leave(namespace)

    def flush(self) -> None:
        try:
            self._environment().env.sync(True)
        except self._lmdb.Error as error:
            raise StoreError(f"the LMDB store at {self.path} cannot be flushed: {error}") from error

    def close(self) -> None:
        """Sync all writes to disk and release the store; the last process to close it marks it as clean."""
        try:
            if read_state(self.path) is not None:
                self._environment()
        except StoreError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        _leave(self.path, self._user)
        self._last = None


def held(key: bytes) -> bytes:
    """Return a key if LMDB can hold it; else raise a ValueError."""
    if not 0 < len(key) <= KEY:
        raise ValueError(said("key", f"1 to {KEY} bytes", key))
    return key


def _leave(path: Path, user: object) -> None:
    try:
        leave_environment(path, user)
    except StoreError as error:
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)


def _used(stat: Any) -> int:
    """Return the bytes of the pages that hold samples."""
    return int((stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) * stat["psize"])


def _check_directory(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; pass a directory for this LMDBStore alone")
    if problem := others_may_write(path, FILES):
        raise ValueError(problem)
    if (path / "data.mdb").exists() and read_state(path) is None:
        raise ValueError(f"{path} holds an LMDB file that is not a store of samples; pass another directory")
    kind = _file_system(path)
    if kind in NETWORK or kind.startswith("fuse."):
        raise ValueError(f"{path} is on {kind}, where memory maps of several nodes conflict; pass a local directory")


def _file_system(path: Path) -> str:
    """Return the kind of file system of `path`; "" if it is unknown."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    found = [(len(mount[1]), i, mount[2]) for i, mount in enumerate(mounts) if path.is_relative_to(mount[1])]
    return max(found)[2] if found else ""
