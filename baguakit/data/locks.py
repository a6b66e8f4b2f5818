"""Locks between threads and between the processes of a node, and the files that these share."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from weakref import WeakValueDictionary


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
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

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
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    def close(self) -> None:
        """Release all bytes, and close the file."""
        os.close(self._file)


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
