"""Measure the bandwidth of TCP between two machines, for several numbers of threads and sockets.

The client sends a hello and then data over each flow. At the end of the data, the server returns the number of bytes
that it has received. The rate is the sum of these numbers, divided by the time until the last number has arrived.

`nccl_socket_settings` finds the number of threads and sockets of NCCL's own TCP transport for a link.
"""

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Annotated

from ..arguments import Range, checked, integer, real, several, text

Layout = tuple[int, int]
Port = Annotated[int, Range(0, 65535)]
LAYOUTS: tuple[Layout, ...] = tuple(
    (threads, sockets) for threads in (1, 2, 4, 8, 16) for sockets in (1, 2, 4, 8) if threads * sockets <= 64
)
PORT = 29640
HELLO, COUNT = b"baguakit link 1\n", struct.Struct("!Q")
BUFFER, TIMEOUT = 1 << 18, 30.0  # bytes of a flow's buffer; seconds to wait for the other side
MOST_FLOWS, HELLO_TIMEOUT = 128, 5.0  # flows of a server, twice as many as NCCL uses; seconds to wait for a hello


def measure(
    host: str, port: int = PORT, *, layouts: Sequence[Layout] = LAYOUTS, seconds: float = 1.0
) -> dict[Layout, float]:
    """Return the bandwidth of an idle link to `host`, where `serve` runs, in bytes per second, by layout.

    Args:
        host, port: the name or address of the server, and its port.
        layouts: pairs (threads, sockets of each thread), each of at most 128 sockets in all.
        seconds: the time to send with each layout. The wait until the last byte has arrived comes on top.

    Raises:
        ConnectionError: the server does not answer or ends; the message names host and port.
        TypeError, ValueError: a layout, the port or the time is impossible.
    """
    text("host", host)
    port, seconds = integer("port", port, 1, 65535), real("seconds", seconds, above=0, most=86400)
    asked = []
    for given in several("layouts", layouts, "a list of pairs (threads, sockets of each thread)"):
        if not isinstance(given, (tuple, list)) or len(given) != 2:
            raise TypeError(f"each of layouts is a pair (threads, sockets of each thread), not {given!r}")
        named = zip(("threads", "sockets of each thread"), given, strict=True)
        threads, sockets = (integer(f"{name} of the layout {given!r}", n, 1) for name, n in named)
        integer(f"the number of flows of the layout {given!r}", threads * sockets, 1, MOST_FLOWS)
        asked.append((threads, sockets))
    try:
        return {layout: _rate((host, port), *layout, seconds) for layout in asked}
    except UnicodeError:
        raise ValueError(f"host is a name or an address, not {host!r}") from None
    except OSError as error:
        raise ConnectionError(
            f"cannot measure the link to {host} port {port} ({error}); run `baguakit net measure --server "
            "--bind ADDRESS` there, with an address that this machine reaches, and open the port in the firewall"
        ) from error


@checked
def serve(address: str = "127.0.0.1", port: Port = PORT, *, ready: Callable[[str, int], None] | None = None) -> None:
    """Receive and count the data that `measure` sends, until a KeyboardInterrupt.

    At most 128 flows are received at a time, each by a thread with a buffer of 256 KiB (32 MiB in all). Further flows
    wait. A flow is closed if no valid hello arrives within 5 seconds, or if later no data arrives for 30 seconds.

    Args:
        address: the IPv4 or IPv6 address of this machine on the link. There is no authentication, so by default only
            this machine can connect. "0.0.0.0" accepts connections to all IPv4 addresses of this machine.
        port: the port to listen on; 0 for a free one.
        ready: a function that is called with the address and the port when clients may connect.

    Raises:
        OSError: the server cannot listen on the address.
        TypeError, ValueError: the address or the port is impossible, or `ready` cannot be called.
    """
    text("address", address)
    try:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        server = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    except (OSError, UnicodeError) as error:
        place = f"address {address!r} port {port} ({error})"
        raise OSError(f"cannot listen on {place}; pass an address of this machine") from error
    free = threading.BoundedSemaphore(MOST_FLOWS)

    def receive(flow: socket.socket) -> None:
        """Count the bytes of a flow, and reply with the count."""
        try:
            with flow, suppress(OSError):  # of clients that disconnect
                if _read(flow, len(HELLO), HELLO_TIMEOUT) != HELLO:
                    return
                flow.settimeout(TIMEOUT)
                buffer, count = bytearray(BUFFER), 0
                while received := flow.recv_into(buffer):
                    count += received
                flow.sendall(COUNT.pack(count))
        finally:
            free.release()

    with server:
        if ready:
            ready(*server.getsockname()[:2])
        while True:  # if no thread is free, flows wait in the queue of the operating system
            free.acquire()
            flow, _ = server.accept()
            threading.Thread(target=receive, args=(flow,), daemon=True).start()


def _rate(address: tuple[str, int], threads: int, sockets: int, seconds: float) -> float:
    flows: list[socket.socket] = []
    with ExitStack() as stack:
        for _ in range(threads * sockets):
            flows.append(stack.enter_context(socket.create_connection(address, timeout=TIMEOUT)))
            flows[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flows[-1].sendall(HELLO)
        start = threading.Barrier(threads, timeout=TIMEOUT)
        with ThreadPoolExecutor(threads) as pool:
            spans = list(pool.map(lambda i: _fill(flows[i::threads], start, seconds), range(threads)))
    begins, ends, counts = zip(*spans, strict=True)
    return float(sum(counts) / (max(ends) - min(begins)))


def _fill(flows: list[socket.socket], start: threading.Barrier, seconds: float) -> tuple[float, float, int]:
    """Send over the flows of one thread; return (start time, end time, number of bytes that the server received)."""
    payload = bytes(BUFFER)
    with selectors.DefaultSelector() as selector:
        for flow in flows:
            flow.setblocking(False)
            selector.register(flow, selectors.EVENT_WRITE)
        start.wait()
        begin = time.perf_counter()
        while (left := begin + seconds - time.perf_counter()) > 0:
            for key, _ in selector.select(left):
                with suppress(BlockingIOError):
                    key.fileobj.send(payload)  # type: ignore[union-attr]
    for flow in flows:
        flow.shutdown(socket.SHUT_WR)
    counts = [COUNT.unpack(_read(flow, COUNT.size))[0] for flow in flows]
    return begin, time.perf_counter(), sum(counts)


def _read(flow: socket.socket, size: int, within: float = TIMEOUT) -> bytes:
    """Return `size` bytes; raise ConnectionResetError if the flow ends, TimeoutError after `within` seconds."""
    data, until = b"", time.monotonic() + within
    while len(data) < size:
        flow.settimeout(max(until - time.monotonic(), 1e-3))
        part = flow.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        data += part
    return data


NCCL_THREADS, NCCL_FLOWS = 16, 64  # NCCL's limits for a connection
NEAR = 0.95  # of the best rate: repeated measurements differ by about 5 %


@dataclass(frozen=True)
class SocketSettings:
    """Settings of the sockets of an NCCL connection. NCCL opens one connection for each channel and peer.

    Args:
        threads: the threads of a connection, 1 to 16.
        sockets_per_thread: the sockets of each thread; `threads × sockets_per_thread` is at most 64.
        rate: the measured bytes per second, greater than 0.

    Raises:
        TypeError, ValueError: a number is out of its range.
    """

    threads: int
    sockets_per_thread: int
    rate: float

    def __post_init__(self) -> None:
        integer("threads", self.threads, 1, NCCL_THREADS)
        integer("sockets_per_thread", self.sockets_per_thread, 1, NCCL_FLOWS)
        real("rate", self.rate, above=0)
        if self.flows > NCCL_FLOWS:
            given = f"{self.threads} threads of {self.sockets_per_thread} are {self.flows}"
            raise ValueError(f"NCCL uses 1 to {NCCL_FLOWS} sockets per connection, and {given}")

    @property
    def flows(self) -> int:
        """Return the number of TCP flows of a connection. It is also a good value of the plugin's BAGUANET_STREAMS."""
        return self.threads * self.sockets_per_thread

    def environment(self) -> dict[str, str]:
        """Return the environment variables to export before the program starts."""
        return {"NCCL_SOCKET_NTHREADS": str(self.threads), "NCCL_NSOCKS_PERTHREAD": str(self.sockets_per_thread)}


def nccl_socket_settings(link: str | Mapping[Layout, float]) -> SocketSettings:
    """Return the settings with the fewest flows (then threads) that reach 95 % of the best bandwidth on a link.

    Unnecessary flows cost memory, a core for each busy thread, and bandwidth of other users of the link.

    Args:
        link: the bytes per second by (threads, sockets of each thread), as `measure` returns them; or a host that runs
            `baguakit net measure --server --bind ADDRESS`, whose link is then measured for about 30 seconds.

    Raises:
        ValueError: there is no measurement, or NCCL does not support a layout.
        ConnectionError: the host does not answer.
    """
    rates = measure(link) if isinstance(link, str) else link
    if not isinstance(rates, Mapping):
        raise TypeError(f"link is a host, or rates by (threads, sockets of each thread), not {link!r}")
    wrong = [layout for layout in rates if not isinstance(layout, tuple) or len(layout) != 2]
    if wrong:
        raise TypeError(f"each key of link is a layout, a pair (threads, sockets of each thread), not {wrong[0]!r}")
    if not rates:
        raise ValueError("link has no rate: pass {(threads, sockets of each thread): bytes per second} or a host")
    measured = [SocketSettings(threads, sockets, rate) for (threads, sockets), rate in rates.items()]
    enough = NEAR * max(each.rate for each in measured)
    return min((each for each in measured if each.rate >= enough), key=lambda each: (each.flows, each.threads))
