"""The caller's side of live ranks: start their processes, send calls to them, and print their output."""

import contextlib
import linecache
import math
import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import torch

from ..arguments import integer, real, several, truth
from .serving import HOST, Launcher, dumps, launcher, receive, send, takes_closures

MOST_THREADS, MOST_SECONDS = 1 << 15, 1e8  # of torch; about three years: longer times may overflow clocks
GRACE = 2.0  # seconds that the other ranks have to reply after one has failed
STACK_SECONDS = 0.3  # that a rank has to print its stack
BEAT = 60.0  # seconds between two looks at the time: select takes no infinite timeout
PIPE = 1 << 20  # the most bytes that a pipe holds, by Linux's default


class RankError(RuntimeError):
    """A call failed on some ranks. `failures` is {rank: reason}, and the message has all reasons."""

    __module__ = "baguakit"  # tracebacks show the public name

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        alike = {why: [r for r, each in sorted(failures.items()) if each == why] for why in failures.values()}
        names = {why: f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" for why, ranks in alike.items()}
        super().__init__("\n\n".join(f"{ranks}: {why}" for why, ranks in names.items()))


class Ranks:
    """Processes on this machine, one per rank, that run the caller's functions. A context manager.

        with bk.Ranks(4) as ranks:
            ranks.run(train)

    The first call starts the processes. They run until `close()`, until a call fails, until this object is deleted, or
    until the caller's process ends. They form torch's default process group, which `bk.Comm()` uses. The group runs
    gloo on the loopback interface, so other machines cannot reach it. The processes have the working directory, the
    environment and `sys.path` of the caller, but not its variables. A script needs no `if __name__ == "__main__"`. The
    function of a notebook is sent with the values that it refers to.

    Args:
        size: the number of ranks.
        threads: the number of torch's threads on each rank.
        cuda: rank r uses GPU r, and NCCL sends between GPUs. If there are fewer GPUs, ranks share them, which is slow.
        timeout: the seconds that gloo waits for another rank; None for torch's default, 30 minutes.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, or `cuda` is True and there is no GPU.
        OSError: the system cannot fork processes, or `run` would open more files than it may (three for each rank).
    """

    def __init__(self, size: int, *, threads: int = 1, cuda: bool = False, timeout: float | None = None) -> None:
        self.size, self.threads = integer("size", size, 1), integer("threads", threads, 1, MOST_THREADS)
        self.cuda = truth("cuda", cuda)
        self.timeout = None if timeout is None else real("timeout", timeout, above=0, most=MOST_SECONDS)
        if cuda and not torch.cuda.is_available():
            raise ValueError("cuda=True lets ranks use GPUs, but torch finds none; leave it out")
        self._processes = list[Process]()
        self._end: Callable[[], Any] = lambda: None
        self._closed, self._lock = False, threading.Lock()
        self._launcher = launcher()  # it imports torch while the caller goes on

    def run(
        self, function: Callable[..., Any], *args: Any, limit: float | None = None, lost: Sequence[int] = ()
    ) -> list[Any]:
        """Call `function(*args)` on every rank, and return the results by rank.

        The ranks' output is printed at once, with the rank before each line. If a rank raises, the other ranks have two
        seconds to return. If a call fails, is interrupted or loses a rank, all processes end. A new call restarts them.

        Args:
            function: any function; closures, lambdas and functions of a notebook need cloudpickle.
            args: the arguments of the function, the same on all ranks.
            limit: the seconds after which the call fails and each rank that still runs prints its stack; None for no
                limit. The time begins when the ranks have started, and includes the transfer of the results.
            lost: ranks that are expected to die in this call. `run` does not wait for them, and returns None for them.

        Raises:
            RankError: the function raised on a rank (the message has the traceback), or a rank died or was late.
            TypeError: the function cannot be pickled, or an argument has a wrong type.
            ValueError: an argument is out of range.
            KeyboardInterrupt: the call was interrupted; the ranks have printed their stacks.
        """
        if not callable(function):
            raise TypeError(f"run takes a function and its arguments, not {function!r}; leave out the parentheses")
        try:
            packed = dumps((function, args))
        except Exception as error:
            missing = "" if takes_closures() else "; for closures and functions of a notebook install cloudpickle"
            raise TypeError(f"{function!r} cannot be sent to the ranks: {error}{missing}") from error
        limit = math.inf if limit is None else real("limit", limit, above=0, most=MOST_SECONDS)
        listed = several("lost", lost, "a sequence of ranks")
        gone = {integer("a rank in lost", rank, 0, self.size - 1) for rank in listed}
        # Ranks get the source of code that is not in a file, such as a notebook cell, so that their tracebacks show it.
        sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
        work = pickle.dumps({"path": [*map(str, sys.path)], "sources": sources, "packed": packed})
        values: dict[int, Any] = {}
        with self._lock:
            try:
                self._start()
                failures = self._perform(work, set(range(self.size)) - gone, values, limit)
            finally:
                if len(values) < self.size:
                    self.close()
        if failures:
            raise RankError(failures)
        return [values.get(rank) for rank in range(self.size)]

    def _start(self) -> None:
        """Start the processes and let them connect, unless all of them run already."""
        if self._processes and self._launcher.usable and not any(process.ended() for process in self._processes):
            return
        self.close()
        self._launcher, self._closed, self._processes = launcher(), False, []
        self._end = weakref.finalize(self, end, self._launcher, self._processes, os.getpid())
        with socket.create_server((HOST, 0)) as server:  # for torch's store, which would else listen on all interfaces
            for rank in range(self.size):
                files = [server.fileno()] * (rank == 0)
                self._processes.append(Process(rank, self._launcher, files))
            port = server.getsockname()[1]
        size = str(self.size)
        given = {"folder": os.getcwd(), "threads": self.threads, "cuda": self.cuda, "timeout": self.timeout}
        for process in self._processes:
            own, place = str(process.rank), {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}  # as by torchrun
            place |= {"RANK": own, "WORLD_SIZE": size, "LOCAL_RANK": own, "LOCAL_WORLD_SIZE": size}
            try:
                send(pickle.dumps({"environment": {**os.environ, **place}, **given}), process.control)
                receive(process.control)
            except (EOFError, OSError) as error:
                self._finish()
                raise RuntimeError(f"rank {process.rank} could not start; its error is above (on stderr)") from error

    def _perform(self, work: bytes, waiting: set[int], values: dict[int, Any], limit: float) -> dict[int, str]:
        """Send `work`, the pickled arguments of `serving.perform`, to all ranks; return {rank: reason} of failed ranks.

        Wait for the ranks in `waiting`, for at most `limit` seconds, and for at most two more seconds once a rank has
        failed. Put {rank: result} into `values`.
        """
        until, failures = time.monotonic() + limit, dict[int, str]()

        def fail(ranks: Collection[int], reason: str) -> None:
            failures.update(dict.fromkeys(waiting.intersection(ranks), reason))
            waiting.difference_update(ranks)

        def hear(process: Process) -> bool:
            """Read the answer of a rank; return False if the process of the rank has ended."""
            rank = process.rank
            try:
                packed, _ = receive(process.control)
            except (EOFError, OSError):
                fail([rank], "its process has ended")
                return False
            try:
                value, reason = pickle.loads(packed)
            except Exception as error:
                value, reason = None, f"its result cannot be unpickled by the caller: {error!r}"
            if reason is not None:
                fail([rank], reason)
            elif rank in waiting:
                waiting.discard(rank)
                values[rank] = value
            return True

        readers: dict[Any, Callable[[], bool]] = {}
        for process in self._processes:
            readers[process.control] = partial(hear, process)
            readers.update((stream.file, stream.read) for stream in process.streams)
            with contextlib.suppress(OSError):  # the process has ended, as `hear` will find
                send(work, process.control)
        hurried = False
        try:
            while waiting:
                for ready in wait([*readers], max(0.0, min(until - time.monotonic(), BEAT))):
                    if not readers[ready]():
                        del readers[ready]
                if failures and not hurried:
                    hurried, until = True, min(until, time.monotonic() + GRACE)
                if waiting and time.monotonic() >= until:
                    if not hurried:
                        self._show_stacks(waiting)
                    late = f"{GRACE:g} s after another rank failed" if hurried else f"after {limit:g} s"
                    fail(range(self.size), f"it was still running {late}")
        except KeyboardInterrupt:
            self._show_stacks(waiting)
            raise
        finally:
            self._finish()
        return failures

    def _show_stacks(self, ranks: Collection[int]) -> None:
        """Make `ranks` print their stacks to stderr, and wait a moment for this output."""
        if self._launcher.usable:  # while it runs, ids of ended ranks are not reused
            for rank in ranks:
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(STACK_SECONDS if ranks else 0)

    def _finish(self) -> None:
        """Print all output that the ranks have written so far, including unfinished lines."""
        for process in self._processes:
            for stream in process.streams:
                stream.read(last=True)

    def close(self) -> None:
        """End the processes. A later `run` starts new ones. Idempotent."""
        self._closed = True
        self._end()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Ranks({self.size}), closed: run() starts new processes>" if self._closed else f"Ranks({self.size})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "it refers to the Ranks, which do not exist on a rank; use bk.Comm().rank and bk.Comm().size there"
        )


class Process:
    """The process of a rank, its socket for calls and replies, and its output. The constructor starts the process."""

    def __init__(self, rank: int, launcher: Launcher, files: Sequence[int]) -> None:
        self.rank = rank
        self.control, theirs = socket.socketpair()
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        self.streams = Stream(out, rank, "stdout"), Stream(err, rank, "stderr")
        with theirs, os.fdopen(their_out, "wb"), os.fdopen(their_err, "wb"):
            self.pid = launcher.fork(self.control, [theirs.fileno(), their_out, their_err, *files])

    def ended(self) -> bool:
        """Return whether the process has closed its end of the control socket."""
        try:
            return not self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def end(launcher: Launcher, processes: list[Process], owner: int) -> None:
    """Close the pipes and sockets to `processes`. If this process has the id `owner`, kill the `processes` first."""
    if owner == os.getpid():
        launcher.end([process.pid for process in processes])
    for process in processes:
        process.control.close()
        for stream in process.streams:
            stream.file.close()
    processes.clear()


class Stream:
    """The output of one rank to stdout or stderr: the reading end of a pipe."""

    def __init__(self, file: int, rank: int, name: str) -> None:
        os.set_blocking(file, False)
        self.file, self._rank, self._name, self._rest = os.fdopen(file, "rb", 0), rank, name, b""

    def read(self, last: bool = False) -> bool:
        """Print the complete lines, and with `last` also an unfinished line. Return False if the rank closed the pipe.

        Read only once, at most the size of a pipe. So a rank that never stops writing does not block the caller.
        """
        data = self.file.read(PIPE)  # None if there is nothing
        *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
        if last and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")  # as by a terminal
            print(f"[{self._rank}] {shown}", file=getattr(sys, self._name), flush=True)
        return data != b""
