"""Doors: a process listens on a socket, its door. Other processes connect to the door to test the network path.

    OPEN     the door has accepted the connection
    GONE     the host has refused the connection or closed it: the process has ended
    SILENT   there is no route, or no answer within `ANSWERS` seconds: the link is broken, or the host is off
    ""       the state is not known yet, or the process has no door

The kernel accepts connections, so the door of a process that computes or is stopped is open, too. Doors use gloo's
network interface. Nothing is sent over these connections, and the store is not used.
"""

import errno
import os
import socket
import threading
import time
from contextlib import suppress

from ..comm.addresses import family_of, own_address

OPEN, GONE, SILENT = "open", "gone", "silent"
ANSWERS = 3.0  # seconds in which a host answers; the kernel asks again after 1 s


class Door:
    """The door of this process. A forked child closes its copy, so that the door closes when this process ends."""

    def __init__(self) -> None:
        self.address = ""
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []  # the one that listens, and one for each caller
        with suppress(OSError, ImportError):  # no address is known: others wait for signs of life
            host = own_address()
            listener = socket.create_server((host, 0), family=family_of(host), backlog=1024)
            listener.setblocking(False)
            self.address = f"{host}:{listener.getsockname()[1]}"
            self._sockets.append(listener)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.close)

    def let_in(self) -> None:
        """Accept new connections, and close connections that the other process has closed."""
        with self._lock:
            for each in self._sockets[1:]:
                if not is_open(each):
                    self._sockets.remove(each)
                    each.close()
            with suppress(BlockingIOError):
                while self._sockets:
                    guest, _ = self._sockets[0].accept()
                    guest.setblocking(False)
                    self._sockets.append(guest)

    def close(self) -> None:
        for each in self._sockets:
            each.close()
        self._sockets = []


class Knocks:
    """The connections of this process to the doors of other processes. Not thread-safe."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[socket.socket, float]] = {}  # by address; since when. Closed: the door is gone

    def knock(self, address: str) -> str:
        """Return the state of the door at `address`: OPEN, GONE, SILENT or "". Do not wait for an answer."""
        if not address:
            return ""
        host, _, port = address.rpartition(":")
        if address not in self._made:
            self._made[address] = (socket.socket(family_of(host)), time.monotonic())
            self._made[address][0].setblocking(False)
        made, since = self._made[address]
        try:
            with suppress(ConnectionError):  # the socket is not open then
                made.connect((host, int(port)))  # again after an error: there may be a route now
        except BlockingIOError:  # it is still connecting
            return SILENT if time.monotonic() - since > ANSWERS else ""
        except OSError as error:
            if error.errno not in (errno.EISCONN, errno.EBADF):
                return SILENT
        if is_open(made):
            return OPEN
        made.close()  # a refusal is reported only once
        return GONE

    def end(self) -> None:
        for made, _ in self._made.values():
            made.close()
        self._made.clear()


def is_open(made: socket.socket) -> bool:
    """Return whether a socket is connected, and its other end is not closed."""
    try:
        return bool(made.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False
