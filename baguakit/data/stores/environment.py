"""LMDB environments, each opened once per process, and their recovery after a crash.

Commits are not synced to disk: the kernel has the commits of a killed process, but after a crash of the machine the
file may be inconsistent. `state.json` in the directory therefore holds the boot in which the file was last opened, and
whether the last process to close it synced it. A file opened in another boot and not synced is emptied.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import others_may_write, replace_file
from ..locks import KeyedLocks, ThreadLock
from .base import StoreError
from .bytelocks import ByteLocks

if TYPE_CHECKING:
    import lmdb

PRESENCE, OPENING, DATASETS, CLAIMS = 0, 1, 1 << 61, 1 << 62  # bytes of the file of locks
FILES = ("data.mdb", "lock.mdb", "locks", "state.json")
READERS = 4096  # the most processes × threads that read at the same time

_environments: dict[Path, Environment] = {}
_guard = ThreadLock()
_writing = ThreadLock()  # held while this process writes or forks, so that no child inherits an open transaction
_fork_hooks: list[bool] = []


def import_lmdb() -> Any:
    """Return the lmdb package; raise ImportError, with the command that installs it, if it is missing."""
    try:
        import lmdb
    except ImportError:
        raise ImportError("LMDBStore needs the lmdb package: pip install baguakit[data]") from None
    return lmdb


def join_environment(path: Path, map_size: int, user: object) -> Environment:
    """Return this process's environment at `path`, open until all users leave it; raise StoreError if that fails."""
    with _guard:
        environment = _environments.get(path)
        if environment is not None and environment.pid != os.getpid():
            environment.abandon()
            environment = None
        if environment is None:
            if not _fork_hooks and hasattr(os, "register_at_fork"):
                os.register_at_fork(before=_writing.__enter__, after_in_parent=_release_writing)
                _fork_hooks.append(True)
            environment = _environments[path] = Environment(path, map_size)
        environment.users.add(user)
        return environment


def _release_writing() -> None:
    _writing.__exit__(None, None, None)


def leave_environment(path: Path, user: object) -> None:
    """Remove a user of this process's environment at `path`; sync and close it after the last. May raise StoreError."""
    with _guard:
        environment = _environments.get(path)
        if environment is None or environment.pid != os.getpid():
            return
        environment.users.discard(user)
        if not environment.users:
            del _environments[path]
            environment.close()


def boot_id() -> str | None:
    """Return the identity of this boot of the machine; None if it is unknown: then commits are synced."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


class Environment:
    """An open LMDB environment, its locks, and the datasets of it that this process uses."""

    def __init__(self, path: Path, map_size: int) -> None:
        self.path, self.pid, self.writing, self.users = path, os.getpid(), _writing, set[object]()
        self._lmdb, self._claims, self._datasets = import_lmdb(), KeyedLocks(), Counter[bytes]()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if problem := others_may_write(path, FILES):
                raise StoreError(problem)
            self._locks = ByteLocks(path / "locks")
        except OSError as error:
            raise StoreError(f"the LMDB store at {path} cannot be opened: {error}") from error
        try:
            with self._locked(OPENING):
                self.env = self._opened(map_size)
        except BaseException as error:
            self._locks.close()
            if isinstance(error, (OSError, self._lmdb.Error)):
                raise StoreError(f"the LMDB store at {path} cannot be opened: {error}") from error
            raise

    @contextmanager
    def _locked(self, number: int) -> Iterator[None]:
        self._locks.take(number)
        try:
            yield
        finally:
            self._locks.free(number)

    def _opened(self, map_size: int) -> lmdb.Environment:
        if not self._locks.take(PRESENCE, wait=False):
            self._locks.take(PRESENCE, shared=True)
            return self._environment(map_size)
        state = read_state(self.path)
        if state is not None and state.get("boot") != boot_id() and not state.get("clean"):
            self._empty("the machine crashed while it was open")
        self._write_state(clean=False)
        try:
            env = self._environment(map_size)
            if _is_whole(self.path, env):
                return env
            env.close()
            reason = "its file was truncated"
        except (self._lmdb.InvalidError, self._lmdb.CorruptedError, self._lmdb.VersionMismatchError) as error:
            reason = f"it cannot be read: {error}"
        finally:
            self._locks.take(PRESENCE, shared=True)
        self._empty(reason)
        return self._environment(map_size)

    def _environment(self, map_size: int) -> lmdb.Environment:
        sync = boot_id() is None
        env: lmdb.Environment = self._lmdb.open(
            str(self.path),
            map_size=map_size,
            mode=0o600,
            sync=sync,
            metasync=False,
            readahead=False,
            max_readers=READERS,
        )
        env.reader_check()
        return env

    def _empty(self, reason: str) -> None:
        for name in ("data.mdb", "lock.mdb"):
            with suppress(FileNotFoundError):
                (self.path / name).unlink()
        warnings.warn(f"the LMDB store at {self.path} is emptied: {reason}", RuntimeWarning, stacklevel=2)

    def _write_state(self, clean: bool) -> None:
        replace_file(self.path / "state.json", json.dumps({"format": 1, "boot": boot_id(), "clean": clean}).encode())

    def close(self) -> None:
        """Sync to disk and close; the last process marks the store as clean."""
        try:
            try:
                self.env.sync(True)
            finally:
                self.env.close()
            with self._locked(OPENING):
                if self._locks.take(PRESENCE, wait=False):
                    self._write_state(clean=True)
        except (OSError, self._lmdb.Error) as error:
            raise StoreError(f"the LMDB store at {self.path} cannot be flushed: {error}") from error
        finally:
            self._locks.close()

    def abandon(self) -> None:
        """Close the parent's environment in a forked child, before the child takes its own locks."""
        self._locks.close()
        self.env.close()

    @contextmanager
    def claim(self, key: bytes) -> Iterator[None]:
        """Hold the lock of `key` among all processes and threads of the node."""
        number = CLAIMS + _number(key, 61)
        with self._claims.hold(key):
            held = self._locks.take(number)
            try:
                yield
            finally:
                if held:
                    with suppress(OSError):  # the file was closed, which released the lock
                        self._locks.free(number)

    def enter(self, dataset: bytes) -> None:
        """Register one more use of the dataset by this process."""
        self._datasets[dataset] += 1
        if self._datasets[dataset] == 1:
            self._locks.take(DATASETS + _number(dataset, 60), shared=True)

    def leave(self, dataset: bytes) -> None:
        """Register one use less of the dataset by this process."""
        self._datasets[dataset] -= 1
        if self._datasets[dataset] == 0:
            self._locks.free(DATASETS + _number(dataset, 60))

    def is_idle(self, dataset: bytes) -> bool:
        """Return whether no process uses the dataset."""
        if self._datasets[dataset] > 0:
            return False
        number = DATASETS + _number(dataset, 60)
        if not self._locks.take(number, wait=False):
            return False
        self._locks.free(number)
        return True


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the content of `state.json`; None if the directory holds no store."""
    try:
        state = json.loads((path / "state.json").read_bytes())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _is_whole(path: Path, env: lmdb.Environment) -> bool:
    """Return whether the file holds as many pages as the environment counts."""
    pages = env.info()["last_pgno"] + 1
    return (path / "data.mdb").stat().st_size >= pages * env.stat()["psize"] or env.stat()["entries"] == 0


def _number(key: bytes, bits: int) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") & ((1 << bits) - 1)
