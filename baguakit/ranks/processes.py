"""The processes of a `Ranks`, and one call of them."""

import contextlib
import math
import os
import pickle
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .launcher import FILES, Launcher, Screen, Stream, launcher
from .serving import HEAD, Progress, Reply, Start, Work

GRACE = 2.0  # seconds that the other ranks have to reply after one has failed
SPARE = 64  # open files for everything else
STACK_SECONDS = 0.3  # that a rank has to print its stack


class CallerConnection:
    """The caller's end. A message to a rank is a pickle; one from a rank is its length and a pickle.

    After `unblock`, `write` and `read` do not block: a rank may be slow or stopped, or send much.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._unsent = memoryview(b"")
        self._buffer, self._received = bytearray(HEAD.size), 0  # for the next part, and the bytes of it so far
        self._in_head = True

    def fileno(self) -> int:
        """Return the file descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, message: bytes) -> None:
        """Set the message that `write` sends, in place of any unsent one."""
        self._unsent = memoryview(message)

    def write(self) -> bool:
        """Send as much as possible; return whether more is left, which is False if the rank ended."""
        try:
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
        except BlockingIOError:
            return True
        except OSError:  # the next read raises the error
            self._unsent = memoryview(b"")
        return False

    def read(self) -> bytearray | None:
        """Read once; return the message if it is complete, else None; raise EOFError at the end."""
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

    def receive(self) -> bytearray:
        """Wait for the next message, before `unblock`; raise EOFError at the end."""
        while (message := self.read()) is None:
            pass
        return message

    def unblock(self) -> None:
        """Let `write` and `read` not block from now on."""
        self._socket.setblocking(False)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


@dataclass
class Call:
    """The state of a call.

    Attributes:
        number: the number of the call.
        waiting: the ranks that have not replied yet.
        values: the results by rank.
        failures: the reasons of failures by rank.
    """

    number: int
    waiting: set[int]
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def succeed(self, rank: int, value: Any) -> None:
        """Store the result of a rank."""
        if rank in self.waiting:
            self.waiting.discard(rank)
            self.values[rank] = value

    def fail(self, ranks: Iterable[int], reason: str) -> None:
        """Store the reason of failure for all `ranks` that have not replied."""
        for rank in self.waiting.intersection(ranks):
            self.waiting.discard(rank)
            self.failures[rank] = reason


def check_open_files(size: int) -> None:
    """Raise an OSError if `size` ranks need more open files than a process may have.

    The caller has three for each rank. A rank has a connection to every other one in the default group, and rank 0,
    which holds the store, two or three more from each.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = Path("/proc/self/fd")
    here = len(list(folder.iterdir())) if folder.exists() else 0
    needed = max(here + FILES * size, 4 * size) + SPARE
    if needed > most:
        raise OSError(
            f"{size} ranks need up to {needed} open files in a process, and the limit is {most}; "
            f"set it by `ulimit -n {needed}` before the program starts, or start fewer ranks"
        )


class Processes:
    """The processes of `size` ranks."""

    def __init__(self, size: int) -> None:
        self.size, self._owner = size, os.getpid()
        self._launcher: Launcher = launcher()
        self._pids: list[int] = []
        self._connections: list[CallerConnection] = []
        self._streams: list[Stream] = []
        self.finalize: Callable[[], Any] = self.close

    def start(self, threads: int, cuda: bool, timeout: float | None, screen: Screen) -> None:
        """Start the processes and let them connect: rank 0 chooses a port, which the others receive.

        Raises:
            RuntimeError: a rank could not start.
            OSError: this number of ranks needs more open files than a process may have.
        """
        check_open_files(self.size)
        port = 0
        for rank in range(self.size):
            connection = self._fork(rank)
            settings = Start(rank, self.size, threads, cuda, timeout, dict(os.environ), os.getcwd(), port)
            try:
                connection.send(pickle.dumps(settings))
                connection.write()
                port = port or pickle.loads(connection.receive())
                connection.unblock()
            except (EOFError, OSError) as error:
                self.finish(screen)
                raise RuntimeError(f"rank {rank} could not start; its error is above (on stderr)") from error

    def _fork(self, rank: int) -> CallerConnection:
        ours, theirs = socket.socketpair()
        connection = CallerConnection(ours)
        self._connections.append(connection)
        writing = []
        for is_error in (False, True):
            read, write = os.pipe()
            writing.append(write)
            self._streams.append(Stream(read, rank, is_error))
        try:
            self._pids.append(self._launcher.fork([theirs.fileno(), *writing]))
        finally:
            theirs.close()
            for file in writing:
                os.close(file)
        return connection

    def perform(self, work: Work, call: Call, screen: Screen, limit: float | None) -> None:
        """Send the same work to all ranks, and wait for the replies.

        This takes at most `limit` seconds, and at most two seconds after a rank has failed.
        """
        until, hurried = math.inf if limit is None else time.monotonic() + limit, False
        message = pickle.dumps(work)
        with selectors.DefaultSelector() as selector:
            for rank, connection in enumerate(self._connections):
                connection.send(message)
                selector.register(connection, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
            for stream in self._streams:
                selector.register(stream.file, selectors.EVENT_READ, stream)
            while call.waiting:
                for key, events in selector.select(None if until == math.inf else max(0.0, until - time.monotonic())):
                    self._attend(selector, key, events, call, screen)
                if call.failures and not hurried:
                    hurried, until = True, min(until, time.monotonic() + GRACE)
                if call.waiting and time.monotonic() >= until:
                    if not hurried:
                        self.show_stacks(call)
                    late = f"{GRACE:g} s after another rank failed" if hurried else f"after {limit:g} s"
                    call.fail(range(self.size), f"it was still running {late}")
        self.finish(screen)

    def _attend(
        self, selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int, call: Call, screen: Screen
    ) -> None:
        """Read from or write to a connection or a stream that is ready."""
        if isinstance(key.data, Stream):
            is_open = key.data.read(screen)
        else:
            if events & selectors.EVENT_WRITE and not self._connections[key.data].write():
                selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
            is_open = not events & selectors.EVENT_READ or self._receive(key.data, call, screen)
        if not is_open:
            selector.unregister(key.fileobj)

    def _receive(self, rank: int, call: Call, screen: Screen) -> bool:
        """Read from a rank, and handle the message if it is complete; return False if its process has ended."""
        try:
            message = self._connections[rank].read()
        except (EOFError, OSError):
            call.fail([rank], "its process has ended")
            return False
        if message is None:
            return True
        received = pickle.loads(message)
        if received.number != call.number:  # the reply to an earlier call that did not wait for it
            return True
        if isinstance(received, Progress):
            screen.progress(rank, received)
        elif isinstance(received, Reply) and received.value is not None:
            try:
                call.succeed(rank, pickle.loads(received.value))
            except Exception as error:
                call.fail([rank], f"its result cannot be unpickled by the caller: {error!r}")
        else:
            call.fail([rank], received.error)
        return True

    def show_stacks(self, call: Call) -> None:
        """Let the ranks that have not replied print their stacks to stderr."""
        for rank in call.waiting:
            if self._launcher.alive(self._pids[rank]):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(STACK_SECONDS if call.waiting else 0)

    def finish(self, screen: Screen) -> None:
        """Show the output of the ranks up to now."""
        for stream in self._streams:
            stream.finish(screen)

    def alive(self) -> bool:
        """Return whether all processes run."""
        return len(self._pids) == self.size and all(self._launcher.alive(pid) for pid in self._pids)

    def close(self) -> None:
        """End the processes, unless this is a process forked from the caller's."""
        if self._owner == os.getpid():
            for pid in self._pids:
                self._launcher.end(pid)
        for connection in self._connections:
            connection.close()
        for stream in self._streams:
            os.close(stream.file)
        self._pids, self._connections, self._streams = [], [], []
