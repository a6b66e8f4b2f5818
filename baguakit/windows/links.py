"""Connections between windows: two TCP connections for each pair of peers, each of which asks on one of them.

A connection that breaks is made again, and the request under way is sent again. The edge is dropped at both ends, for
ever, if the peer's host refuses a connection (its process has ended), if the peer has dropped the edge, or if a request
is not answered within `timeout` seconds. A rank that waits for a mutex is told each second that it still waits.
"""

import contextlib
import hmac
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from weakref import WeakSet

import torch

from ..comm.addresses import family_of, own_address
from .memory import Edge, Memory, Side
from .messages import BUSY, DONE, GONE, PING, Message

HEAD = struct.Struct("<Bqqddq")
PAUSE = 0.05  # seconds between two attempts to connect
_sockets: WeakSet[socket.socket] = WeakSet()


def close_copies() -> None:
    """Close what a forked child has inherited, so that connections end with the process that made them."""
    for each in _sockets:
        each.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=close_copies)


class Gone(Exception):
    """The peer has ended, or has dropped the edge."""


class Line:
    """A connection, on which whole messages are sent and received."""

    def __init__(self, made: socket.socket, memory: Memory, timeout: float | None, alive: float) -> None:
        self.socket, self.side, self.sizes = made, Side(memory.format), memory.format.sizes()
        _sockets.add(made)
        made.settimeout(timeout)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":  # a host that is off breaks the connection within this time
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(alive / 2)))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(alive / 8)))
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

    def send(self, message: Message) -> None:
        *head, payload = message
        self.socket.sendall(HEAD.pack(*head, 0 if payload is None else len(payload)))
        if payload is not None:
            self.socket.sendall(payload.numpy().data)

    def receive(self) -> Message:
        *head, size = HEAD.unpack(self._bytes(HEAD.size).numpy().data)
        if size not in self.sizes:
            raise ConnectionError(f"a message of {size} bytes came")
        return Message(*head)._replace(payload=self._bytes(size) if size else None)

    def _bytes(self, count: int) -> torch.Tensor:
        landed = torch.empty(count, dtype=torch.uint8)
        left = landed.numpy().data
        while left:
            if not (came := self.socket.recv_into(left)):
                raise ConnectionError("the peer has closed the connection")
            left = left[came:]
        return landed

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # which wakes the thread that reads
        self.socket.close()


class Links:
    """The connections of a window, and their threads: one for each peer that asks, and one for each to ask."""

    def __init__(self, memory: Memory, rank: int, timeout: float) -> None:
        self.memory, self.rank, self.timeout = memory, rank, timeout
        self.edges: dict[int, Edge] = {}
        self.addresses: dict[int, tuple[str, int]] = {}
        self.token = b""
        self.lines: set[Line] = set()
        self.threads: list[threading.Thread] = []
        host = own_address()
        self.listener = socket.create_server((host, 0), family=family_of(host), backlog=1024)
        _sockets.add(self.listener)
        self.address: tuple[str, int] = (host, self.listener.getsockname()[1])

    def start(self, token: bytes, addresses: dict[int, tuple[str, int]]) -> None:
        """Connect to all peers; `token` is a secret of all ranks of the window."""
        self.token, self.addresses = token, addresses
        self._run(self._accept)
        self.edges = {peer: Edge(self.memory, peer) for peer in addresses}
        for edge in self.edges.values():
            self._run(self._ask_all, edge)

    def _run(self, work: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="baguakit window", daemon=True)
        with self.memory.changed:
            self.threads = [each for each in self.threads if each.is_alive()] + [thread]
            thread.start()

    def _keep(self, made: socket.socket, timeout: float | None) -> Line:
        line = Line(made, self.memory, timeout, self.timeout)
        with self.memory.changed:
            if self.memory.closed:
                line.close()
                raise Gone("this window is closed")
            self.lines.add(line)
        return line

    def _end(self, line: Line) -> None:
        with self.memory.changed:
            self.lines.discard(line)
        line.close()

    # The end that answers.

    def _accept(self) -> None:
        while not self.memory.closed:
            try:
                made, _ = self.listener.accept()
                self._run(self._answer_all, self._keep(made, None))
            except (OSError, Gone):
                time.sleep(PAUSE)  # where the process may open no more files, they take a while to be closed

    def _answer_all(self, line: Line) -> None:
        peer = -1
        try:
            peer = self._let_in(line)
            while True:
                line.send(self.memory.answer(peer, line.receive(), line.side, lambda: line.send(Message(BUSY))))
        except OSError:
            if peer in self.edges:
                self.edges[peer].ask(PING)  # find out whether the peer has ended
        finally:
            with self.memory.changed:
                for held in [each for each in self.memory.queue if each[1] is line.side]:
                    self.memory.unlock(*held)
            self._end(line)

    def _let_in(self, line: Line) -> int:
        """Return the rank that has made a connection, if it knows the secret."""
        line.socket.settimeout(self.timeout)
        told = bytes(line._bytes(len(self.token) + 4).numpy().data)
        peer = int.from_bytes(told[-4:], "little")
        if not hmac.compare_digest(told[:-4], self.token) or peer not in self.addresses:
            raise ConnectionError("a stranger has made a connection")
        line.socket.settimeout(None)
        line.send(Message(GONE if peer in self.memory.lost else DONE))
        return peer

    # The end that asks.

    def _ask_all(self, edge: Edge) -> None:
        line = None
        try:
            while True:
                line = line or self._connect(edge.peer)
                with edge.changed:
                    edge.changed.wait_for(lambda: self.memory.closed or edge.take() or edge.peer in self.memory.lost)
                    if self.memory.closed or edge.peer in self.memory.lost:
                        return
                try:
                    self._ask(edge, line)
                except TimeoutError:
                    raise Gone(f"rank {edge.peer} has not answered for {self.timeout} s") from None
                except OSError:
                    self._end(line)
                    line = None
        except Gone as gone:
            edge.drop(str(gone))
        finally:
            if line is not None:
                self._end(line)

    def _ask(self, edge: Edge, line: Line) -> None:
        if (asked := edge.packed(line.side)) is not None:
            line.send(asked)
            while (answer := line.receive()).kind == BUSY:
                pass
            if answer.kind == GONE:
                raise Gone(f"rank {edge.peer} has dropped the edge")
            edge.done(answer, line.side)

    def _connect(self, peer: int) -> Line:
        until = time.monotonic() + self.timeout
        while True:
            try:
                line = self._keep(socket.create_connection(self.addresses[peer], self.timeout), self.timeout)
                try:
                    line.socket.sendall(self.token + self.rank.to_bytes(4, "little"))
                    if line.receive().kind == GONE:
                        raise Gone(f"rank {peer} has dropped the edge")
                    return line
                except BaseException:
                    self._end(line)
                    raise
            except ConnectionRefusedError:
                raise Gone(f"rank {peer} has closed its window, or has ended") from None
            except OSError as error:
                if self.memory.closed or time.monotonic() > until:
                    raise Gone(f"rank {peer} is not reached for {self.timeout} s: {error}") from None
                time.sleep(PAUSE)

    def close(self) -> None:
        """End all threads and connections. Requests that wait are not sent."""
        with self.memory.changed:
            self.memory.closed = True
            self.memory.changed.notify_all()
            lines = list(self.lines)
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for line in lines:
            line.close()
        until, here = time.monotonic() + 2.0, threading.current_thread()
        while (left := [t for t in self.threads if t.is_alive() and t is not here]) and time.monotonic() < until:
            left[0].join(0.1)
