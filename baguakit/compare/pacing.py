"""Slow the network down without root: limit the rate of this process's TCP sockets by SO_MAX_PACING_RATE.

The kernel limits each socket separately. To limit the whole process, like a network card, a thread divides the rate
among the connections that have bytes to send, every two milliseconds. The thread finds new connections within twenty
milliseconds; until then these have no limit.

A real link is more exact in two ways. Over the loopback device a packet has up to 64 KiB, and is sent at once if the
connection was idle, so smaller messages are too fast. A connection may also get its share one packet late.
"""

import os
import re
import socket
import threading
import time
from array import array
from contextlib import AbstractContextManager, suppress
from sys import byteorder

TICK, LOOK = 0.002, 0.02  # seconds between two divisions of the rate, and between two searches for new sockets
UNLIMITED = -1
TOO_FAST = 1.25  # of the rate asked for
SO_MAX_PACING_RATE = 47  # Linux
MOST = (1 << 31) - 1  # bytes a second that the option takes
BYTES_ACKED = slice(120, 128)  # of struct tcp_info, Linux
SIOCOUTQNSD = 0x894B  # Linux: the bytes that a connection has accepted and not yet sent


def bits_per_second(rate: str) -> int:
    """Return a rate such as "500mbit" in bits per second; raise a ValueError if `rate` is no rate, or below 8kbit."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(k|m|g)?bit", rate.strip().lower()) if isinstance(rate, str) else None
    bits = round(float(found[1]) * {None: 1, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]]) if found else 0
    if bits < 8_000:
        raise ValueError(f'a rate is 8kbit or more, such as "500mbit" or "1gbit"; not {rate!r}')
    return bits


def written(bits: float) -> str:
    """Return a rate in bits per second as text, such as "100 Mb/s"."""
    unit, size = next((each for each in (("G", 1e9), ("M", 1e6)) if bits >= each[1]), ("k", 1e3))
    return f"{bits / size:.3g} {unit}b/s"


def connections() -> dict[str, int]:
    """Return {name: descriptor} of this process's sockets. The kernel never uses a name again."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the folder itself is closed by now
            found[os.readlink(f"/proc/self/fd/{fd}")] = int(fd)
    return {name: fd for name, fd in found.items() if name.startswith("socket:")}


def at(fd: int) -> socket.socket:
    """Return a socket object for a duplicate of a descriptor: closing the object does not close the descriptor."""
    return socket.socket(fileno=os.dup(fd))


def cap(one: socket.socket, bytes_per_second: float) -> None:
    """Limit the rate of a TCP connection; leave a socket of another kind as it is."""
    if is_tcp(one):
        one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, min(int(bytes_per_second), MOST))


def is_tcp(one: socket.socket) -> bool:
    return one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM


def unsent(one: int | socket.socket) -> int:
    """Return the bytes that a TCP connection has not sent yet; raise an OSError if the socket is not a connection."""
    import fcntl  # which Windows lacks

    count = array("i", [0])
    fcntl.ioctl(one, SIOCOUTQNSD, count)
    return count[0]


def sent() -> int:
    """Return the bytes of payload that this process has sent over all its open TCP connections. Linux only."""
    total = 0
    for fd in connections().values():
        with suppress(OSError), at(fd) as one:  # a closed descriptor, or a socket that is no connection, raises
            if is_tcp(one):
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                total += int.from_bytes(info[BYTES_ACKED], byteorder)
    return total


class Pacer(AbstractContextManager["Pacer"]):
    """A context manager that limits the bytes per second that this process sends over TCP. Linux only.

    A thread sets the limits. It stores descriptors and no duplicates, because a duplicate would keep a connection open
    after its owner has closed it. If a descriptor is closed and soon reused, the new socket may get a limit.
    """

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._limits: dict[str, float] = {}  # of each socket that was open at the last look
        self._over = threading.Event()
        self._look()
        self._thread = threading.Thread(target=self._watch, name="baguakit pacer", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        next_look = 0.0
        while not self._over.wait(TICK):
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + LOOK
            # Connections that have bytes to send share the rate. An idle connection may begin at the whole rate.
            busy = set()
            for name, fd in self._open.items():
                with suppress(OSError):  # a closed descriptor raises, and the next look forgets it
                    busy |= {name} if unsent(fd) > 0 else set()
            for name in self._open:
                self._limit(name, self._rate / len(busy) if name in busy else self._rate)

    def _look(self) -> None:
        """Find new sockets and limit their rates; forget closed sockets."""
        self._open = connections()
        self._limits = {name: limit for name, limit in self._limits.items() if name in self._open}
        for name in self._open.keys() - self._limits.keys():
            self._limit(name, self._rate)

    def _limit(self, name: str, rate: float) -> None:
        if self._limits.get(name) != rate:
            self._limits[name] = rate
            with suppress(OSError), at(self._open[name]) as one:  # a descriptor that has been closed since raises
                cap(one, rate)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._look()
        for name in self._open:
            self._limit(name, UNLIMITED)


def check_pace(sent: float, rate: float) -> None:
    """Raise an OSError if sockets that should send `rate` bytes per second send `sent`, which is too fast."""
    if sent > TOO_FAST * rate:
        asked = f"asked for {written(8 * rate)}, got {written(8 * sent)}"
        raise OSError(f"the sockets of this system do not keep to a rate: {asked}")
