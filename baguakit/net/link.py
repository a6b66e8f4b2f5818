"""Measures what TCP carries between two machines, by the number of threads and sockets.

    client: hello, bytes … end  →  server counts  →  client: the count; then rate = all bytes / time until all counts

so bytes that only lie in buffers are not taken for carried.
"""

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any

from ..arguments import real, said, text, whole

Layout = tuple[int, int]
PARTS = ("threads", "sockets of each thread")
LAYOUTS: tuple[Layout, ...] = tuple(
    (threads, sockets) for threads in (1, 2, 4, 8, 16) for sockets in (1, 2, 4, 8) if threads * sockets <= 64
)
PORT = 29640
HELLO, COUNT = b"baguakit link 1\n", struct.Struct("!Q")
BUFFER, PATIENCE = 1 << 18, 30.0  # bytes of a flow; seconds without news from the other side
MOST_FLOWS, GREETING = 128, 5.0  # that a server has at a time: twice what NCCL takes; seconds that a hello may take


def measure(
    host: str, port: int = PORT, *, layouts: Sequence[Layout] = LAYOUTS, seconds: float = 1.0
) -> dict[Layout, float]:
    """Bytes a second to `host`, where `serve` runs, for each of the `layouts` (threads, sockets of each thread).

    Each is measured for `seconds` and until the last byte has arrived. Nobody else should use the link meanwhile.
    A layout has at most 128 flows. Raises ConnectionError, naming host and port, if nobody answers there or the other
    side goes away; ValueError or TypeError for a layout, a port or a time that cannot be.
    """
    text("host", host)
    port, seconds = whole("port", port, 1, 65535), real("seconds", seconds, above=0, most=86400)
    if not isinstance(layouts, Sequence) or isinstance(layouts, str):
        raise TypeError(f"layouts is a list of pairs (threads, sockets of each thread), not {layouts!r}")
    asked = [_layout(layout) for layout in layouts]
    try:
        return {layout: _rate((host, port), layout, seconds) for layout in asked}
    except UnicodeError:
        raise ValueError(f"host is a name or an address, not {host!r}") from None
    except OSError as error:
        raise ConnectionError(
            f"cannot measure the link to {host} port {port} ({error}); is `python -m baguakit.net measure --server "
            "--bind ADDRESS` running there, with an address that this machine reaches, and does the firewall let the "
            "port through?"
        ) from error


def _layout(given: object) -> Layout:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise TypeError(f"a layout is a pair (threads, sockets of each thread), not {given!r}")
    threads, sockets = (whole(f"{what} of the layout {given!r}", n, 1) for what, n in zip(PARTS, given, strict=True))
    whole(f"the number of flows of the layout {given!r}", threads * sockets, 1, MOST_FLOWS)
    return threads, sockets


def serve(address: str = "127.0.0.1", port: int = PORT, *, ready: Callable[[str, int], None] | None = None) -> None:
    """Receive what `measure` sends, until interrupted (KeyboardInterrupt passes through).

    `address` is the one to listen on, IPv4 or IPv6: this machine's on the link to be measured. By default only this
    machine itself is let in, since nobody has to prove who they are; "0.0.0.0" lets in all that reach any of its
    addresses. Port 0 takes a free one. `ready` is called once with the address and port when clients may come.

    At most 128 flows are received at a time, each by a thread with 256 KiB (32 MiB in all); others wait until one ends.
    Whoever does not begin with the right hello within 5 seconds, or is silent for 30 later, is sent away.

    Raises OSError if the address cannot be had, ValueError or TypeError for an address or a port that cannot be.
    """
    text("address", address)
    whole("port", port, 0, 65535)
    if ready is not None and not callable(ready):
        raise TypeError(said("ready", "a function of an address and a port", ready))
    try:
        server = _server(address)((address, port), _Count)
    except (OSError, UnicodeError) as error:
        raise OSError(
            f"cannot listen on address {address!r} port {port} ({error}); give one of this machine"
        ) from error
    with server:
        if ready:
            ready(str(server.server_address[0]), int(server.server_address[1]))
        server.serve_forever()


def _server(address: str) -> type[ThreadingTCPServer]:
    class Server(ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = socket.SOMAXCONN
        room = threading.BoundedSemaphore(MOST_FLOWS)

        def get_request(self) -> tuple[socket.socket, Any]:
            self.room.acquire()  # until then whoever comes waits in the system's queue
            try:
                return super().get_request()
            except BaseException:
                self.room.release()
                raise

        def shutdown_request(self, request: Any) -> None:
            """End a flow. Called once for each that came, however it went."""
            super().shutdown_request(request)
            self.room.release()

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that goes away is no news."""

    return Server


class _Count(BaseRequestHandler):
    """One flow at the server."""

    def handle(self) -> None:
        if _read(self.request, len(HELLO), GREETING) != HELLO:
            return
        self.request.settimeout(PATIENCE)
        buffer, count = bytearray(BUFFER), 0
        while received := self.request.recv_into(buffer):
            count += received
        self.request.sendall(COUNT.pack(count))


def _rate(address: tuple[str, int], layout: Layout, seconds: float) -> float:
    threads, sockets = layout
    flows: list[socket.socket] = []
    try:
        for _ in range(threads * sockets):
            flows.append(socket.create_connection(address, timeout=PATIENCE))
            flows[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            flows[-1].sendall(HELLO)
        start = threading.Barrier(threads, timeout=PATIENCE)
        with ThreadPoolExecutor(threads) as pool:
            spans = list(pool.map(lambda i: _fill(flows[i::threads], start, seconds), range(threads)))
    finally:
        for flow in flows:
            flow.close()
    begins, ends, counts = zip(*spans, strict=True)
    return float(sum(counts) / (max(ends) - min(begins)))


def _fill(flows: list[socket.socket], start: threading.Barrier, seconds: float) -> tuple[float, float, int]:
    """One thread keeps its flows full for some seconds. Returns when it began and ended, and the bytes that arrived."""
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


def _read(flow: socket.socket, size: int, within: float = PATIENCE) -> bytes:
    """`size` bytes; ConnectionResetError if there are fewer, TimeoutError if they take too long."""
    data, until = b"", time.monotonic() + within
    while len(data) < size:
        flow.settimeout(max(until - time.monotonic(), 1e-3))
        part = flow.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        data += part
    return data
