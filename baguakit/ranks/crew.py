"""The processes of some ranks, from their start to their end, and one call of theirs."""

import math
import os
import pickle
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .launcher import Launcher, launcher
from .lines import CallersEnd
from .serving import Answer, Progress, Start, Work
from .showing import Screen, Stream

GRACE = 2.0  # seconds that the others have for an answer once a rank has failed
LOOK = 0.3  # seconds for a rank to say where it stands


@dataclass
class Call:
    """The state of a call: the ranks waited for, and by rank the values that have come and the reasons of failures."""

    number: int
    waiting: set[int]
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def succeed(self, rank: int, value: Any) -> None:
        """A rank has answered."""
        if rank in self.waiting:
            self.waiting.discard(rank)
            self.values[rank] = value

    def fail(self, ranks: Iterable[int], reason: str) -> None:
        """These have failed, those of them that are waited for."""
        for rank in self.waiting.intersection(ranks):
            self.waiting.discard(rank)
            self.failures[rank] = reason


class Crew:
    """`size` processes."""

    def __init__(self, size: int) -> None:
        self.size, self._owner = size, os.getpid()
        self._launcher: Launcher = launcher()
        self._pids: list[int] = []
        self._pipes: list[CallersEnd] = []
        self._streams: list[Stream] = []
        self.finalize: Callable[[], Any] = self.close

    def start(self, threads: int, cuda: bool, timeout: float | None, screen: Screen) -> None:
        """Make the processes, and let them find each other: rank 0 chooses a port, and the others are told.

        Raises:
            RuntimeError: rank 0 could not.
        """
        port = 0
        for rank in range(self.size):
            pipe = self._fork(rank)
            told = Start(rank, self.size, threads, cuda, timeout, dict(os.environ), os.getcwd(), port)
            try:
                pipe.send(pickle.dumps(told))
                pipe.flush()
                port = port or pickle.loads(pipe.receive())
            except (EOFError, OSError) as error:
                self.finish(screen)
                raise RuntimeError(f"rank {rank} could not start; what it said of it is above (on stderr)") from error

    def _fork(self, rank: int) -> CallersEnd:
        ours, theirs = socket.socketpair()
        pipe = CallersEnd(ours)
        self._pipes.append(pipe)
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
        return pipe

    def perform(self, work: Work, call: Call, screen: Screen, limit: float | None) -> None:
        """Send all of them the same work, and wait for the answers.

        All takes `limit` seconds at most, and once one has failed two seconds more.
        """
        until, hurried = math.inf if limit is None else time.monotonic() + limit, False
        message = pickle.dumps(work)
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self._pipes):
                pipe.send(message)
                selector.register(pipe, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
            for stream in self._streams:
                selector.register(stream.file, selectors.EVENT_READ, stream)
            while call.waiting:
                for key, events in selector.select(None if until == math.inf else max(0.0, until - time.monotonic())):
                    self._attend(selector, key, events, call, screen)
                if call.failures and not hurried:
                    hurried, until = True, min(until, time.monotonic() + GRACE)
                if call.waiting and time.monotonic() >= until:
                    if not hurried:
                        self.show_where(call)
                    late = f"{GRACE:g} s after another had failed" if hurried else f"after {limit:g} s"
                    call.fail(range(self.size), f"it was still at work {late}")
        self.finish(screen)

    def _attend(
        self, selector: selectors.BaseSelector, key: selectors.SelectorKey, events: int, call: Call, screen: Screen
    ) -> None:
        """Do what a pipe or a stream is ready for."""
        if isinstance(key.data, Stream):
            goes_on = key.data.read(screen)
        else:
            if events & selectors.EVENT_WRITE and not self._pipes[key.data].write():
                selector.modify(key.fileobj, selectors.EVENT_READ, key.data)
            goes_on = not events & selectors.EVENT_READ or self._hear(key.data, call, screen)
        if not goes_on:
            selector.unregister(key.fileobj)

    def _hear(self, rank: int, call: Call, screen: Screen) -> bool:
        """Take what has come of a rank's message; False if it is gone."""
        try:
            message = self._pipes[rank].read()
        except (EOFError, OSError):
            call.fail([rank], "its process has ended")
            return False
        if message is None:
            return True
        said = pickle.loads(message)
        if said.number != call.number:  # of an earlier call, in which it was not waited for
            return True
        if isinstance(said, Progress):
            screen.progress(rank, said)
        elif isinstance(said, Answer) and said.value is not None:
            try:
                call.succeed(rank, pickle.loads(said.value))
            except Exception as error:
                call.fail([rank], f"what it returned cannot be read here: {error!r}")
        else:
            call.fail([rank], said.error)
        return True

    def show_where(self, call: Call) -> None:
        """Let the ranks that are waited for write to stderr where they stand."""
        for rank in call.waiting:
            if self._launcher.alive(self._pids[rank]):
                os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(LOOK if call.waiting else 0)

    def finish(self, screen: Screen) -> None:
        """Show what they have written up to now."""
        for stream in self._streams:
            stream.finish(screen)

    def alive(self) -> bool:
        """Whether all of them run."""
        return len(self._pids) == self.size and all(self._launcher.alive(pid) for pid in self._pids)

    def close(self) -> None:
        """End them. A process that was forked from the caller's has no part in it."""
        if self._owner == os.getpid():
            for pid in self._pids:
                self._launcher.end(pid)
        for pipe in self._pipes:
            pipe.close()
        for stream in self._streams:
            os.close(stream.file)
        self._pids, self._pipes, self._streams = [], [], []
