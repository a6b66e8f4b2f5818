"""The connection between the caller and a rank: messages with their lengths, over a socket pair.

Functions are pickled by cloudpickle, which takes closures, or by pickle where it is not installed.
"""

import contextlib
import importlib
import importlib.util
import io
import os
import pickle
import selectors
import socket
import struct
import threading
from collections import ChainMap
from functools import cache
from types import CodeType
from typing import Any

HEAD = struct.Struct("!Q")


class CallerConnection:
    """The caller's end. `send`, `write` and `read` do not block: a rank may be slow or stopped, or send much."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = memoryview(b"")
        self._buffer, self._received = bytearray(HEAD.size), 0  # for the next part, and the bytes of it so far
        self._in_head = True

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Set the message that `write` sends, in place of any unsent one."""
        self._unsent = memoryview(HEAD.pack(len(message)) + message)

    def write(self) -> bool:
        """Send as much as possible without blocking; return whether more is left, which is False if the rank ended."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return True
        except OSError:  # the next read raises the error
            self._unsent = memoryview(b"")
        return False

    def read(self) -> bytearray | None:
        """Read without blocking; return the message if it is complete, else None; raise EOFError at the end."""
        with contextlib.suppress(BlockingIOError):
            count = self._socket.recv_into(memoryview(self._buffer)[self._received :])
            if not count:
                raise EOFError
            self._received += count
        if self._received < len(self._buffer):
            return None
        part, was_head = self._buffer, self._in_head
        size = HEAD.unpack(part)[0] if was_head else HEAD.size
        self._buffer, self._received, self._in_head = bytearray(size), 0, not was_head
        return None if was_head else part

    def flush(self) -> None:
        """Wait until the message is sent."""
        while self.write():
            self._wait(selectors.EVENT_WRITE)

    def receive(self) -> bytearray:
        """Wait for the next message; raise EOFError at the end."""
        while (message := self.read()) is None:
            self._wait(selectors.EVENT_READ)
        return message

    def _wait(self, event: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, event)
            selector.select()

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


class RankConnection:
    """The rank's end; several threads may send."""

    def __init__(self, file: int) -> None:
        self._socket, self._lock = socket.socket(fileno=file), threading.Lock()
        self.number = -1  # of the current call

    def send(self, message: Any) -> None:
        """Send one message."""
        packed = pickle.dumps(message)
        with self._lock:
            self._socket.sendall(HEAD.pack(len(packed)))
            self._socket.sendall(packed)

    def receive(self) -> Any:
        """Wait for the next message; end the process if the caller's has ended."""
        try:
            (size,) = HEAD.unpack(self._bytes(HEAD.size))
            return pickle.loads(self._bytes(size))
        except (EOFError, OSError):
            os._exit(0)

    def _bytes(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]
        return data


def takes_closures() -> bool:
    """Return True if cloudpickle is installed."""
    return importlib.util.find_spec("cloudpickle") is not None


def dumps(value: Any) -> bytes:
    """Return a value, pickled."""
    if not takes_closures():
        return pickle.dumps(value)
    file = io.BytesIO()
    _pickler()(file).dump(value)
    return file.getvalue()


@cache
def _pickler() -> Any:
    """Return cloudpickle's class, but code keeps the name of its file, by which tracebacks find its source.

    cloudpickle 3.1.3 writes "<dynamic-code>" in its place.
    """
    kind: Any = importlib.import_module("cloudpickle").Pickler

    def reduced(code: CodeType) -> tuple[Any, ...]:
        make, parts, *more = kind.dispatch_table[CodeType](code)
        named = (code.co_filename if isinstance(part, str) and part == "<dynamic-code>" else part for part in parts)
        return (make, tuple(named), *more)

    return type("Pickler", (kind,), {"dispatch_table": ChainMap({CodeType: reduced}, kind.dispatch_table)})
