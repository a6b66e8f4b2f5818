"""Locks among the processes of a node: bytes of one file, freed by the kernel when their holder dies.

POSIX record locks belong to a process: a forked child holds none of its parent's, and closing any descriptor of the
file drops all of a process's own. Each process therefore opens the file once.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

try:
    import fcntl
except ImportError:  # no POSIX: threads still exclude each other, processes do not
    fcntl = None  # type: ignore[assignment]


class ByteLocks:
    """Locks numbered 0 … 2**62 in the file `path`, made if missing."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def take(self, number: int, shared: bool = False, wait: bool = True) -> bool:
        """Lock a byte; False where it cannot be had: held elsewhere (without `wait`), or waiting would never end."""
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
        if fcntl is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    def close(self) -> None:
        os.close(self._file)
