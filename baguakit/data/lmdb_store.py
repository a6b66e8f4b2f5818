"""A store in one memory-mapped file per node.

Commits are not synced to disk. The kernel writes the commits of a killed process; but if the machine crashes, the file
may be inconsistent. So a write first makes the empty file `unsynced-BOOT`, where BOOT is the id of the machine's boot.
`close` syncs the samples and removes it. Both hold LMDB's writer lock. A file of an earlier boot empties the store.
"""

import atexit
import os
import shutil
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ..arguments import instance, integer, message, package, text
from .stores import KeyedLocks, Store, StoreError, ThreadLock

if TYPE_CHECKING:
    import lmdb

with suppress(ImportError):  # Windows has no fcntl: LMDBStore is refused there
    import fcntl

NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "afs", "glusterfs"}
SPARE = 1 << 20  # bytes of the disk that stay free, because LMDB cannot say that a write was cut short by a full disk
OWNER = partial(os.open, mode=0o600)  # opens files for the owner only
MOST_KEY = 511  # bytes; what LMDB is built with
READERS = 4096  # the most threads, of all processes, that read at the same time

_environments: dict[Path, "Environment"] = {}
_guard = ThreadLock()
_writing = ThreadLock()  # held while this process writes or forks, so that no child inherits an open transaction


def _close_all(flush: bool) -> None:
    while _environments:
        _environments.popitem()[1].close(flush)


atexit.register(_close_all, flush=True)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_writing.__enter__,
        after_in_parent=_writing.__exit__,
        after_in_child=partial(_close_all, flush=False),  # the parent's environments, before the child takes locks
    )


class LMDBStore(Store):
    """A store in a directory on a disk or in the shared memory of this node, for all processes of the node.

    If a process is killed, the store stays readable, and the locks of the process are released. After a crash of the
    machine the store is empty, unless it had been closed. A full store keeps its samples and takes no new ones:
    LRU eviction would always remove the sample that an epoch needs next. `clear` makes room.

    Args:
        path: a directory for this store alone, not on a network file system; made if missing, for its owner only.
        capacity_bytes: the limit, in bytes of the pages that hold samples, equal in all processes; the file may be
            larger by an eighth plus 16 MiB.

    Raises:
        ValueError: `path` is on a network file system; other users may write to it (and could run code in this process
            with `codec=Pickle()`); or the directory has an LMDB file that is not a store of samples.
    """

    def __init__(self, path: str | os.PathLike[str], capacity_bytes: int = 64 << 30) -> None:
        instance("path", path, (str, os.PathLike), "a directory")
        if "fcntl" not in globals():
            raise ValueError("LMDBStore needs the file locks of POSIX systems; use MemoryStore or RedisStore")
        self.capacity_bytes = integer("capacity_bytes", capacity_bytes, 1 << 20, 1 << 46)  # as much as can be mapped
        self.path = path = Path(text("path", os.fspath(path))).expanduser().resolve()
        if path.exists() and not path.is_dir():
            raise ValueError(f"path {path} is a file; pass a directory for this LMDBStore alone")
        if problem := others_may_write(path):
            raise ValueError(problem)
        if (path / "data.mdb").exists() and not (path / "claims").exists():
            found = "holds an LMDB file that is not a store of samples, or one of an earlier version"
            raise ValueError(f"{path} {found}; pass another directory, or empty it")
        kind = file_system(path)
        if kind in NETWORK or kind.startswith("fuse."):
            raise ValueError(f"{path} is on {kind}, where memory maps of nodes conflict; pass a local directory")
        self._lmdb = package("lmdb", "LMDBStore")

    def __repr__(self) -> str:
        return f"LMDBStore({str(self.path)!r}, capacity_bytes={self.capacity_bytes})"

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.capacity_bytes)

    def _environment(self) -> "Environment":
        """Return this process's LMDB environment of the path; open it if needed. Raise StoreError if opening fails."""
        with _guard:
            if self.path not in _environments:
                _environments[self.path] = Environment(self)
            return _environments[self.path]

    def get(self, key: bytes) -> bytes | None:
        return self.get_many([key])[0]

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        with self._environment().transaction() as transaction:
            return [transaction.get(_fitting(key)) for key in keys]

    def put(self, key: bytes, value: bytes) -> bool:
        with self._environment().transaction(write=True) as transaction:
            counts: Any = transaction.stat()
            used = sum(counts[f"{kind}_pages"] for kind in ("branch", "leaf", "overflow")) * counts["psize"]
            more = len(value) + 3 * counts["psize"]
            if used + more > self.capacity_bytes or shutil.disk_usage(self.path).free < more + SPARE:
                return False
            return transaction.put(_fitting(key), value)

    @contextmanager
    def claim(self, key: bytes) -> Iterator[None]:
        with ExitStack() as stack:
            with suppress(StoreError):
                environment = self._environment()
                stack.enter_context(environment.claims.hold(key))
                stack.enter_context(locked(environment.locks, claim_byte(key)))
            yield

    def clear(self, namespace: bytes = b"") -> None:
        with self._environment().transaction(write=True) as transaction:
            cursor = transaction.cursor()
            found = cursor.set_range(namespace) if namespace else cursor.first()
            while found and cursor.key().startswith(namespace):
                found = cursor.delete()

    def close(self) -> None:
        """Sync the writes of all processes to disk, and close the store in this process."""
        with suppress(StoreError):
            if (self.path / "data.mdb").exists():
                self._environment()
        with _guard:
            if environment := _environments.pop(self.path, None):
                environment.close()


def _fitting(key: bytes) -> bytes:
    """Return the key if LMDB can hold it; raise a ValueError if it cannot."""
    if not 0 < len(key) <= MOST_KEY:
        raise ValueError(message("key", f"1 to {MOST_KEY} bytes", key))
    return key


class Environment:
    """An LMDB environment, which a process may open only once, and the file of the locks between processes.

    Each lock locks one byte of this file. The kernel releases all locks of a process when the process ends or closes
    any descriptor of the file. So each process opens the file only once.
    """

    def __init__(self, store: LMDBStore) -> None:
        self.path, self.claims, self._lmdb = store.path, KeyedLocks(), store._lmdb
        self.unsynced = store.path / f"unsynced-{boot_id()}"
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if problem := others_may_write(self.path):
                raise StoreError(problem)
            with ExitStack() as failed:
                self.locks = failed.enter_context(open(self.path / "claims", "a+b", opener=OWNER))
                with locked(self.locks, 0):
                    self._empty_after_a_crash()
                    self.env = self._open(store.capacity_bytes + store.capacity_bytes // 8 + (16 << 20))
                failed.pop_all()
        except (OSError, self._lmdb.Error) as error:
            cause = f"the LMDB store at {self.path} cannot be opened: {error}"
            raise StoreError(f"{cause}; if it is damaged, empty this directory") from error

    def _empty_after_a_crash(self) -> None:
        if earlier := [each for each in self.path.glob("unsynced-*") if each != self.unsynced]:
            for each in (self.path / "data.mdb", self.path / "lock.mdb", *earlier):
                each.unlink(missing_ok=True)
            why = "the machine crashed while it was open"
            warnings.warn(f"the LMDB store at {self.path} is emptied: {why}", RuntimeWarning, stacklevel=2)

    def _open(self, map_size: int) -> "lmdb.Environment":
        settings = {"mode": 0o600, "metasync": False, "sync": boot_id() is None, "readahead": False}
        env: lmdb.Environment = self._lmdb.open(str(self.path), map_size=map_size, max_readers=READERS, **settings)
        env.reader_check()
        size = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        if env.stat()["entries"] and (self.path / "data.mdb").stat().st_size < size:  # to read it would be a SIGBUS
            env.close()
            raise OSError("its file was truncated")
        return env

    @contextmanager
    def transaction(self, write: bool = False) -> "Iterator[lmdb.Transaction[bytes]]":
        """Yield a transaction that is committed when the `with` block ends; raise StoreError if the store fails."""
        try:
            with _writing if write else nullcontext(), self.env.begin(write=write) as transaction:
                if write and not self.unsynced.exists():
                    self.unsynced.touch(mode=0o600)
                    os.fsync(directory := os.open(self.path, os.O_RDONLY))
                    os.close(directory)
                yield transaction
        except self._lmdb.MapResizedError:
            larger = "is open elsewhere with a larger capacity_bytes; pass the same everywhere"
            raise StoreError(f"the LMDB store at {self.path} {larger}") from None
        except (self._lmdb.Error, OSError) as error:
            raise StoreError(f"the LMDB store at {self.path} failed: {error}") from error

    def close(self, flush: bool = True) -> None:
        """Close the environment and its locks. With `flush`, first sync to disk what all processes have written."""
        if flush:
            try:
                with self.transaction(write=True):
                    self.env.sync(True)
                    self.unsynced.unlink()
            except StoreError as error:
                warnings.warn(str(error), RuntimeWarning, stacklevel=3)
        self.locks.close()
        self.env.close()


@contextmanager
def locked(file: IO[bytes], byte: int) -> Iterator[None]:
    """Lock one byte of `file` in a `with` block, against other processes. If locking fails, run the block unlocked."""
    with suppress(OSError):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, byte)
    try:
        yield
    finally:
        with suppress(ValueError):  # the file was closed, which released it
            fcntl.lockf(file, fcntl.LOCK_UN, 1, byte)


def claim_byte(key: bytes) -> int:
    """Return the position of the byte that `claim(key)` locks; keys rarely share a byte. `Environment` locks byte 0."""
    return 1 + int.from_bytes(blake2b(key, digest_size=7).digest(), "big")


def boot_id() -> str | None:
    """Return the id of the machine's current boot, or None if the id is unknown. Then every commit is synced."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def others_may_write(path: Path) -> str:
    """Return an error text if other users, except the superuser, may write to a store or its files, else ""."""
    for place in (path, *(path / name for name in ("data.mdb", "lock.mdb", "claims"))):
        with suppress(FileNotFoundError):
            found = place.stat()
            if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return (
                    f"{place} can be written by others (it is user {found.st_uid}'s and its mode is "
                    f"{stat.S_IMODE(found.st_mode):04o}), who could add data that this process would read or run; pass "
                    f"a directory of your own, or empty {path}, chown it to user {os.geteuid()} and chmod it to 0700"
                )
    return ""


def file_system(path: Path) -> str:
    """Return the type of the file system that has `path`, such as "nfs4"; "" if it is unknown."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    except OSError:
        return ""
    found = [(len(mount[1]), i, mount[2]) for i, mount in enumerate(mounts) if path.is_relative_to(mount[1])]
    return max(found)[2] if found else ""
