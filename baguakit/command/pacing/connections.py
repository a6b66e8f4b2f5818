"""The sockets of this process, and caps on the rate at which they send."""

import fcntl
import os
import socket
from array import array
from collections.abc import Iterator
from contextlib import suppress

SO_MAX_PACING_RATE = 47  # Linux
MOST = (1 << 31) - 1  # bytes a second that the option takes
SIOCOUTQNSD = 0x894B  # Linux: the bytes that a connection has accepted and not yet sent


def connections() -> dict[str, int]:
    """Return the descriptors of this process's sockets by the kernel's names, which are never used again."""
    return {name: fd for name, fd in links() if name.startswith("socket:")}


def links() -> Iterator[tuple[str, int]]:
    """Yield the target and the number of each descriptor of this process."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself is closed by now
            yield os.readlink(f"/proc/self/fd/{fd}"), int(fd)


def at(fd: int) -> socket.socket:
    """Return the socket of a descriptor; closing it does not close the descriptor."""
    return socket.socket(fileno=os.dup(fd))


def cap(one: socket.socket, bytes_per_second: float) -> None:
    """Keep a TCP connection below a rate; a socket of another kind stays as it is."""
    if is_tcp(one):
        one.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, min(int(bytes_per_second), MOST))


def uncapped(fd: int) -> bool:
    """Return whether a descriptor is a TCP connection without a cap."""
    with at(fd) as one:
        return is_tcp(one) and one.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == -1


def is_tcp(one: socket.socket) -> bool:
    """Return whether a socket is one of TCP."""
    return one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM


def listens(one: socket.socket) -> bool:
    """Return whether a socket accepts connections, and so carries no bytes."""
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0


def unsent(one: int | socket.socket) -> int:
    """Return the bytes that wait in a TCP connection to be sent; bytes that wait for an acknowledgement do not count.

    Raises:
        OSError: the socket listens, or is closed.
    """
    count = array("i", [0])
    fcntl.ioctl(one, SIOCOUTQNSD, count)
    return count[0]
