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

Layout = tuple[int, int]  # threads, sockets of each thread
LAYOUTS: tuple[Layout, ...] = tuple(
    (threads, sockets) for threads in (1, 2, 4, 8, 16) for sockets in (1, 2, 4, 8) if threads * sockets <= 64
)
PORT = 29640
HELLO, COUNT = b"baguakit link 1\n", struct.Struct("!Q")
BUFFER, PATIENCE = 1 << 20, 30.0  # bytes; seconds without news from the other side


def measure(
    host: str, port: int = PORT, *, layouts: Sequence[Layout] = LAYOUTS, seconds: float = 1.0
) -> dict[Layout, float]:
    """Bytes a second to `host`, where `serve` runs, for each of the `layouts` (threads, sockets of each thread).

    Each is measured for `seconds` and until the last byte has arrived. Nobody else should use the link meanwhile.
    Raises ConnectionError, naming host and port, if nobody answers there or the other side goes away; ValueError for a
    layout or a time that is not positive.
    """
    if not seconds > 0:
        raise ValueError(f"seconds is {seconds}: nothing can be measured in no time")
    for layout in layouts:
        if min(layout) < 1:
            raise ValueError(f"a layout is (threads, sockets of each thread), both 1 or more, and this is {layout}")
    try:
        return {layout: _rate((host, port), layout, seconds) for layout in layouts}
    except OSError as error:
        raise ConnectionError(
            f"cannot measure the link to {host} port {port} ({error}); is `python -m baguakit.net measure --server` "
            "running there, and does the firewall let the port through?"
        ) from error


def serve(address: str = "0.0.0.0", port: int = PORT, *, ready: Callable[[str, int], None] | None = None) -> None:
    """Receive what `measure` sends, until interrupted (KeyboardInterrupt passes through).

    `address` is the one to listen on, IPv4 or IPv6, by default all of IPv4; port 0 takes a free one. `ready` is called
    once with the address and port when clients may come. Whoever does not begin with the right hello is sent away.
    """
    with _server(address)((address, port), _Count) as server:
        if ready:
            ready(str(server.server_address[0]), int(server.server_address[1]))
        server.serve_forever()


def _server(address: str) -> type[ThreadingTCPServer]:
    class Server(ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        allow_reuse_address = True
        daemon_threads = True
        request_queue_size = 128

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that goes away is no news."""

    return Server


class _Count(BaseRequestHandler):
    """One flow at the server."""

    def handle(self) -> None:
        self.request.settimeout(PATIENCE)
        if _read(self.request, len(HELLO)) != HELLO:
            return
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
        flow.settimeout(PATIENCE)
        flow.shutdown(socket.SHUT_WR)
    counts = [COUNT.unpack(_read(flow, COUNT.size))[0] for flow in flows]
    return begin, time.perf_counter(), sum(counts)


def _read(flow: socket.socket, size: int) -> bytes:
    """`size` bytes; ConnectionResetError if there are fewer."""
    data = b""
    while len(data) < size:
        part = flow.recv(size - len(data))
        if not part:
            raise ConnectionResetError("the other side closed the connection")
        data += part
    return data
