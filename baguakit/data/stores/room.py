"""One LMDB environment, opened once by each process, and what keeps it whole.

Commits are not forced to disk one by one: a killed process loses nothing that it committed, since the kernel has it,
but after a crash of the machine the file may be a mixture. So the directory says in `state.json` under which boot it
was last opened and whether the last process to leave had synced it; opened unsynced under another boot, it is emptied.
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
READERS = 4096  # processes × threads that may read at once

_rooms: dict[Path, Room] = {}
_guard = ThreadLock()
_writing = ThreadLock()  # held while this process writes, and while it forks: no child inherits half a transaction
_watched: list[bool] = []


def import_lmdb() -> Any:
    try:
        import lmdb
    except ImportError:
        raise ImportError("LMDBStore needs the lmdb package: pip install baguakit[data]") from None
    return lmdb


def enter_room(path: Path, map_size: int, user: object) -> Room:
    """This process's room at `path`, opened if need be, and kept open for `user`. Raises StoreError."""
    with _guard:
        room = _rooms.get(path)
        if room is not None and room.pid != os.getpid():
            room.abandon()
            room = None
        if room is None:
            if not _watched and hasattr(os, "register_at_fork"):
                os.register_at_fork(before=_writing.__enter__, after_in_parent=_wrote)
                _watched.append(True)
            room = _rooms[path] = Room(path, map_size)
        room.users.add(user)
        return room


def _wrote() -> None:
    _writing.__exit__(None, None, None)


def leave_room(path: Path, user: object) -> None:
    """`user` is done with this process's room at `path`; after the last it is synced and closed. Raises StoreError."""
    with _guard:
        room = _rooms.get(path)
        if room is None or room.pid != os.getpid():
            return
        room.users.discard(user)
        if not room.users:
            del _rooms[path]
            room.close()


def boot_id() -> str | None:
    """Return the identity of this boot of the machine; None where the system does not say: commits are synced."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


class Room:
    """An open environment, its locks, and the datasets that this process reads in it."""

    def __init__(self, path: Path, map_size: int) -> None:
        self.path, self.pid, self.writing, self.users = path, os.getpid(), _writing, set[object]()
        self._lmdb, self._claims, self._datasets = import_lmdb(), KeyedLocks(), Counter[bytes]()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if trouble := others_may_write(path, FILES):
                raise StoreError(trouble)
            self._locks = ByteLocks(path / "locks")
        except OSError as error:
            raise StoreError(f"the LMDB store at {path} cannot be opened: {error}") from error
        try:
            with self._alone(OPENING):
                self.env = self._opened(map_size)
        except BaseException as error:
            self._locks.close()
            if isinstance(error, (OSError, self._lmdb.Error)):
                raise StoreError(f"the LMDB store at {path} cannot be opened: {error}") from error
            raise

    @contextmanager
    def _alone(self, number: int) -> Iterator[None]:
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
            self._empty("the machine went down while it was open")
        self._write_state(clean=False)
        try:
            env = self._environment(map_size)
            if _is_whole(self.path, env):
                return env
            env.close()
            reason = "its file was cut short"
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
        """Sync; the last process to leave says that all is on disk."""
        try:
            try:
                self.env.sync(True)
            finally:
                self.env.close()
            with self._alone(OPENING):
                if self._locks.take(PRESENCE, wait=False):
                    self._write_state(clean=True)
        except (OSError, self._lmdb.Error) as error:
            raise StoreError(f"the LMDB store at {self.path} cannot be flushed: {error}") from error
        finally:
            self._locks.close()

    def abandon(self) -> None:
        """In a forked child: let go of what the parent opened, before the child takes locks of its own."""
        self._locks.close()
        self.env.close()

    @contextmanager
    def claim(self, key: bytes) -> Iterator[None]:
        number = CLAIMS + _number(key, 61)
        with self._claims.hold(key):
            held = self._locks.take(number)
            try:
                yield
            finally:
                if held:
                    with suppress(OSError):  # closed meanwhile: then it is free
                        self._locks.free(number)

    def enter(self, dataset: bytes) -> None:
        self._datasets[dataset] += 1
        if self._datasets[dataset] == 1:
            self._locks.take(DATASETS + _number(dataset, 60), shared=True)

    def leave(self, dataset: bytes) -> None:
        self._datasets[dataset] -= 1
        if self._datasets[dataset] == 0:
            self._locks.free(DATASETS + _number(dataset, 60))

    def is_idle(self, dataset: bytes) -> bool:
        """Whether no process has entered `dataset`."""
        if self._datasets[dataset] > 0:
            return False
        number = DATASETS + _number(dataset, 60)
        if not self._locks.take(number, wait=False):
            return False
        self._locks.free(number)
        return True


def read_state(path: Path) -> dict[str, Any] | None:
    """Return the directory's description of itself; None where no store was there."""
    try:
        state = json.loads((path / "state.json").read_bytes())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _is_whole(path: Path, env: lmdb.Environment) -> bool:
    """Whether the file holds as many pages as the environment counts."""
    pages = env.info()["last_pgno"] + 1
    return (path / "data.mdb").stat().st_size >= pages * env.stat()["psize"] or env.stat()["entries"] == 0


def _number(key: bytes, bits: int) -> int:
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") & ((1 << bits) - 1)
