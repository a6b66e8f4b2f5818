"""A line between the caller and a rank: whole messages, each its length and its bytes, over a socket pair."""

import contextlib
import os
import pickle
import selectors
import socket
import struct
import threading
from typing import Any

HEAD = struct.Struct("!Q")


class CallersEnd:
    """The caller's end. `send`, `write` and `read` never wait: a rank may be slow, stopped, or have much to say."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._unsent = memoryview(b"")
        self._room, self._come = bytearray(HEAD.size), 0  # for what is being read, and how much of it has come
        self._in_head = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Take a message in place of what is unsent; `write` sends it."""
        self._unsent = memoryview(HEAD.pack(len(message)) + message)

    def write(self) -> bool:
        """Send what there is room for; whether more is to be sent, which it is not to a rank that is gone."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return True
        except OSError:  # which reading will find out, and say
            self._unsent = memoryview(b"")
        return False

    def read(self) -> bytearray | None:
        """Read what has come, and return the message that it completes, if it does; EOFError at the end."""
        with contextlib.suppress(BlockingIOError):
            come = self._socket.recv_into(memoryview(self._room)[self._come :])
            if not come:
                raise EOFError
            self._come += come
        if self._come < len(self._room):
            return None
        whole, was_head = self._room, self._in_head
        size = HEAD.unpack(whole)[0] if was_head else HEAD.size
        self._room, self._come, self._in_head = bytearray(size), 0, not was_head
        return None if was_head else whole

    def flush(self) -> None:
        """Wait until all is sent."""
        while self.write():
            self._wait(selectors.EVENT_WRITE)

    def receive(self) -> bytearray:
        """Wait for the next message; EOFError at the end."""
        while (message := self.read()) is None:
            self._wait(selectors.EVENT_READ)
        return message

    def _wait(self, event: int) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, event)
            selector.select()

    def close(self) -> None:
        self._socket.close()


class RanksEnd:
    """This rank's end; messages of several threads do not mix."""

    def __init__(self, file: int) -> None:
        self._socket, self._lock = socket.socket(fileno=file), threading.Lock()
        self.number = -1  # of the call under way

    def send(self, message: Any) -> None:
        """Send one message."""
        packed = pickle.dumps(message)
        with self._lock:
            self._socket.sendall(HEAD.pack(len(packed)))
            self._socket.sendall(packed)

    def receive(self) -> Any:
        """Wait for the next message; without the caller this rank has nothing to live for."""
        try:
            (size,) = HEAD.unpack(self._whole(HEAD.size))
            return pickle.loads(self._whole(size))
        except (EOFError, OSError):
            os._exit(0)

    def _whole(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            come = self._socket.recv_into(view)
            if not come:
                raise EOFError
            view = view[come:]
        return data
