"""The connections of this process, and caps on what they carry."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

SO_MAX_PACING_RATE = 47  # Linux


def connections() -> dict[str, int]:
    """Descriptors of this process that are sockets, by what the kernel calls them: numbers come again, these do not."""
    return {name: fd for name, fd in links() if name.startswith("socket:")}


def links() -> Iterator[tuple[str, int]]:
    """What the descriptors of this process stand for."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own, which is closed by now
            yield os.readlink(f"/proc/self/fd/{fd}"), int(fd)


def at(fd: int) -> socket.socket:
    """The socket of a descriptor, to be closed without closing that."""
    return socket.socket(fileno=os.dup(fd))


def cap(one: socket.socket, bytes_per_second: float) -> None:
    """Keep a TCP connection below a rate; a socket of another kind stays as it is."""
    if is_tcp(one):
        one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(bytes_per_second))


def uncapped(fd: int) -> bool:
    """Whether a descriptor is a TCP connection without a cap."""
    with at(fd) as one:
        return is_tcp(one) and one.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == -1


def is_tcp(one: socket.socket) -> bool:
    """Whether a socket is one of TCP."""
    return one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM
