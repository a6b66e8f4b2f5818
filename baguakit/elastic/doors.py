"""Doors: sockets on gloo's interface, to which other processes connect to learn whether this one can be reached.

    OPEN     connected
    GONE     refused by its host, or closed: the process has ended
    SILENT   no answer for `ANSWERS` seconds, or no route: the link is broken, or the host is off
    ""       not known yet, or the process has no door

The kernel answers, so a process that computes or is stopped has an open door. Nothing is sent over these connections,
and the store is not used.
"""

import fcntl
import os
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress

OPEN, GONE, SILENT = "open", "gone", "silent"
ANSWERS = 3.0  # seconds in which a host answers; the kernel asks again after 1 s
SIOCGIFADDR = 0x8915  # of Linux: the IPv4 address of an interface

_doors: "weakref.WeakSet[Door]" = weakref.WeakSet()


class Door:
    """The door of this process. Forked processes do not keep it open."""

    def __init__(self) -> None:
        self.address = ""
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []  # the one that listens, and one for each caller
        with suppress(OSError):  # an interface without an IPv4 address: others wait for signs of life
            host = own_address()
            listener = socket.create_server((host, 0), family=family_of(host), backlog=1024)
            listener.setblocking(False)
            self.address = f"{host}:{listener.getsockname()[1]}"
            self._sockets.append(listener)
        _doors.add(self)

    def let_in(self) -> None:
        """Accept new connections, and close those whose other end has closed."""
        with self._lock:
            for each in self._sockets[1:]:
                if state_of(each) == GONE:
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


def _close_in_child() -> None:
    for door in list(_doors):
        door.close()


os.register_at_fork(after_in_child=_close_in_child)


class Knocks:
    """The connections of this process to the doors of others. Not thread-safe."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[socket.socket | str, float]] = {}  # by address: a socket or state; since when

    def knock(self, address: str) -> str:
        """Return the state of a door, without waiting."""
        if not address:
            return ""
        now = time.monotonic()
        if address not in self._made:
            self._made[address] = (connecting(address), now)
        made, since = self._made[address]
        found = made if isinstance(made, str) else state_of(made)
        if found == GONE:
            self.forget(address)
            self._made[address] = (GONE, now)  # a socket reports this only once
        elif found == SILENT and now - since > 1:  # there was no route; there may be one now
            self.forget(address)
        return SILENT if not found and now - since > ANSWERS else found

    @classmethod
    def settled(cls, addresses: list[str]) -> list[str]:
        """Return the state of each door; wait until all states are known, at most `ANSWERS` seconds."""
        knocks, until = cls(), time.monotonic() + ANSWERS
        while "" in (found := [knocks.knock(each) for each in addresses]) and time.monotonic() < until:
            time.sleep(0.02)
        knocks.end()
        return found

    def forget(self, address: str) -> None:
        """Close the connection to a door; the next `knock` makes a new one."""
        made, _ = self._made.pop(address)
        if not isinstance(made, str):
            made.close()

    def end(self) -> None:
        for address in list(self._made):
            self.forget(address)


def connecting(address: str) -> socket.socket | str:
    """Return a socket that is connecting to an address; or the door's state: `GONE`, or `SILENT` without a route."""
    host, _, port = address.rpartition(":")
    made = socket.socket(family_of(host), socket.SOCK_STREAM)
    made.setblocking(False)
    try:
        made.connect((host, int(port)))
    except BlockingIOError:
        return made
    except OSError as error:
        made.close()
        return GONE if isinstance(error, ConnectionRefusedError) else SILENT
    return made


def state_of(made: socket.socket) -> str:
    """Return the state of the door to which a socket is connected or connecting."""
    try:
        return OPEN if made.recv(1) else GONE
    except BlockingIOError:
        with suppress(OSError):
            made.getpeername()  # raises until the socket is connected
            return OPEN
        return ""
    except (ConnectionRefusedError, ConnectionResetError):
        return GONE
    except OSError:
        return SILENT


def own_address() -> str:
    """Return the address on which gloo accepts connections: of its interface, or of the name of this host.

    Raises:
        OSError: the interface has no IPv4 address.
    """
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            found = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(found[20:24])
    with suppress(OSError):  # the name of this host is not known
        for _, kind, _, _, place in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family_of(str(place[0])), kind) as tried:
                tried.bind(place)
                return str(place[0])
    return "127.0.0.1"


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
