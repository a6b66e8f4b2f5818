"""A cap on every TCP connection, as clouds have it.

The kernel keeps a socket below its SO_MAX_PACING_RATE. No command has to be changed for it: the laboratory looks for
new sockets in /proc/*/fd of the processes in its namespaces, borrows each through pidfd_getfd and sets the option. A
connection is uncapped for the first few hundredths of a second of its life, at most.
"""

import ctypes
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

from baguakit.compare.pacing import cap

LOOK = 0.02  # seconds
_PIDFD_GETFD = 438  # on every architecture

_libc = ctypes.CDLL(None, use_errno=True)


class Pacer:
    """Keeps each TCP connection in some network namespaces below a rate, in a thread of its own, until closed."""

    def __init__(self, namespaces: Sequence[Path], bytes_per_second: float) -> None:
        self._inodes = {path.stat().st_ino for path in namespaces}
        self._rate = bytes_per_second
        self._known: set[tuple[int, str]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no further. Sockets keep their cap."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(LOOK):
            for pid in residents(self._inodes):
                self._pace(pid)

    def _pace(self, pid: int) -> None:
        try:
            links = {fd: os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
            new = {fd: link for fd, link in links.items() if link[:7] == "socket:" and (pid, link) not in self._known}
            if not new:
                return
            process = os.pidfd_open(pid)
        except OSError:  # the process has ended, or a descriptor has been closed: the next look tells
            return
        try:
            for fd, link in new.items():
                if self._cap(process, int(fd)):
                    self._known.add((pid, link))
        finally:
            os.close(process)

    def _cap(self, process: int, fd: int) -> bool:
        """Cap a descriptor of another process; return whether it is capped now or needs no cap."""
        borrowed = _libc.syscall(_PIDFD_GETFD, process, fd, 0)
        if borrowed < 0:
            return False
        with socket.socket(fileno=borrowed) as s:
            cap(s, self._rate)
        return True


def residents(inodes: set[int]) -> list[int]:
    """The processes that live in some network namespaces."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}/ns/net").st_ino in inodes:
                    found.append(int(name))
            except OSError:  # it has ended
                pass
    return found
