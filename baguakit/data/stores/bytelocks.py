"""Locks between the processes of a node: bytes of one file, released by the kernel when the process ends.

POSIX record locks belong to a process: a forked child does not inherit them, and closing any descriptor of the file
releases all locks of the process. Each process therefore opens the file once.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX: there are locks between threads, but not between processes
    fcntl = None  # type: ignore[assignment]


class ByteLocks:
    """Locks with the numbers 0 … 2**62 in the file `path`, which is created if it is missing."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, number: int, shared: bool = False, wait: bool = True) -> bool:
        """Lock a byte; return False if another process holds it (without `wait`), or if waiting would deadlock."""
        if fcntl is None:
            return True
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
        if fcntl is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    def close(self) -> None:
        """Release all bytes, and close the file."""
        os.close(self._file)
