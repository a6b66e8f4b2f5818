"""The launcher: a process that imports the libraries of ranks once, and forks the ranks.

Importing torch takes seconds; forking takes milliseconds. The user's process is not forked, since it may have threads,
CUDA or a notebook kernel. The fork server of multiprocessing is not used, since its children run the user's script
again. The launcher runs in its own session, so that a keyboard interrupt reaches the user's process only. When the
user's process ends for any reason, its end of the socket closes: the launcher then ends all ranks and itself. If the
launcher is killed, its ranks end too.

The output of ranks appears in the caller's process: printed lines with the rank in front, and progress bars.
"""

import atexit
import codecs
import contextlib
import ctypes
import importlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, TextIO

from .serving import Progress

PRELOADED = ("numpy", "torch", "torch.distributed", "torch._dynamo", "baguakit")
FORK, END, ALIVE = range(3)
REQUEST, REPLY = struct.Struct("<3q"), struct.Struct("<2q")  # (number, action, process id) and (number, result)
FILES = 3  # that a rank receives
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


class Launcher:
    """The launcher, as the user's process sees it. `launcher()` returns the one of this process."""

    def __init__(self) -> None:
        if not hasattr(os, "fork"):
            raise OSError(f"live ranks need os.fork, which {sys.platform} lacks; start the program with torchrun")
        self._socket, theirs = socket.socketpair()
        program = (
            f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; "
            f"from {__name__} import serve; serve({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # a library that has started threads cannot be forked
            )
        self._numbers, self._lock, self._owner = itertools.count(), threading.Lock(), os.getpid()
        self._used = False
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        """True if the launcher runs, and this process started it."""
        return self._socket.fileno() >= 0 and self._owner == os.getpid() and self._process.poll() is None

    def fork(self, files: Sequence[int]) -> int:
        """Start a rank and return its process id; `files` are its control socket, and pipes for stdout and stderr."""
        return self._ask(FORK, 0, files)

    def end(self, pid: int) -> None:
        """Kill a rank, and wait until it has ended. If the launcher has ended, so have its ranks."""
        if self.usable:
            with contextlib.suppress(RuntimeError):
                self._ask(END, pid)

    def alive(self, pid: int) -> bool:
        """Return whether a rank runs."""
        return self.usable and bool(self._ask(ALIVE, pid))

    def close(self) -> None:
        """End all ranks and the launcher."""
        atexit.unregister(self.close)
        self._socket.close()
        if self._owner == os.getpid():
            if not self._used:  # it has no ranks, and may still be importing
                self._process.kill()
            self._process.wait()

    def _ask(self, action: int, pid: int, files: Sequence[int] = ()) -> int:
        with self._lock:
            number, self._used = next(self._numbers), True
            try:
                socket.send_fds(self._socket, [REQUEST.pack(number, action, pid)], files)
                while True:
                    data = self._socket.recv(REPLY.size)
                    if not data:
                        raise ConnectionError("the launcher has ended")
                    replied, result = REPLY.unpack(data)
                    if replied == number:  # other replies are to requests that were interrupted
                        return int(result)
            except OSError as error:
                raise RuntimeError(
                    "the process that launches ranks has ended; its error, if any, is above (on stderr)"
                ) from error


_launcher: Launcher | None = None


def launcher() -> Launcher:
    """Return the launcher of this process; start it if there is none. Requests wait until it is ready."""
    global _launcher
    if _launcher is not None and not _launcher.usable:
        _launcher.close()
        _launcher = None
    if _launcher is None:
        _launcher = Launcher()
    return _launcher


def serve(socket_file: int) -> None:
    """Run the launcher in its own process, until the user's process ends."""
    for name in PRELOADED:
        importlib.import_module(name)
    user = socket.socket(fileno=socket_file)
    pids: set[int] = set()
    while True:
        message, files, _, _ = socket.recv_fds(user, REQUEST.size, FILES)
        if not message:
            break
        number, action, pid = REQUEST.unpack(message)
        if action == FORK:
            result = _fork(user, files)
            pids.add(result)
        elif action == END:
            result = _end(pids, pid)
        else:
            result = _alive(pids, pid)
        try:
            user.sendall(REPLY.pack(number, result))
        except BrokenPipeError:  # an interrupt has ended the user's process meanwhile
            break
    for pid in list(pids):
        os.kill(pid, signal.SIGKILL)
    for pid in list(pids):
        _end(pids, pid)


def _fork(user: socket.socket, files: Sequence[int]) -> int:
    parent, pid = os.getpid(), os.fork()
    if pid:
        for file in files:
            os.close(file)
        return pid
    try:
        user.close()
        _die_with(parent)
        from .serving import run

        run(*files)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _die_with(parent: int) -> None:
    """Let the system kill this process when its parent ends, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the call
            os._exit(1)


# An ended child keeps its process id until waitpid, which only these functions call: they never kill another process.


def _end(pids: set[int], pid: int) -> int:
    if pid in pids:
        pids.discard(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return 0


def _alive(pids: set[int], pid: int) -> int:
    if pid in pids and os.waitpid(pid, os.WNOHANG)[0] == pid:
        pids.discard(pid)
    return int(pid in pids)


PIPE = 1 << 20  # the most bytes that a pipe holds, by Linux's default


class Screen:
    """The output of one call."""

    def __init__(self) -> None:
        self._bars: dict[tuple[int, int], Any] = {}

    def line(self, rank: int, text: str, is_error: bool) -> None:
        """Show a line of a rank."""
        stream: TextIO = sys.stderr if is_error else sys.stdout
        if self._bars:
            next(iter(self._bars.values())).write(f"[{rank}] {text}", file=stream)  # above the bars
        else:
            print(f"[{rank}] {text}", file=stream, flush=True)

    def progress(self, rank: int, report: Progress) -> None:
        """Move a progress bar."""
        from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

        key = (rank, report.loop)
        if key not in self._bars:
            label = f"[{rank}] {report.label}".rstrip()
            self._bars[key] = tqdm(total=report.total, desc=label, leave=True)
        self._bars[key].update(report.done - self._bars[key].n)
        if report.ended:
            self._bars[key].close()

    def close(self) -> None:
        """Close the bars, which stay visible."""
        while self._bars:
            self._bars.popitem()[1].close()


class Stream:
    """The output of one rank to stdout or stderr.

    Attributes:
        file: the reading end of the pipe.
        rank: the rank.
        is_error: whether the output is of stderr.
    """

    def __init__(self, file: int, rank: int, is_error: bool) -> None:
        os.set_blocking(file, False)
        self.file, self.rank, self.is_error = file, rank, is_error
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._rest = ""

    def read(self, screen: Screen) -> bool:
        """Show the complete lines; return False at the end of the pipe.

        It reads once, at most the size of a pipe, so that a rank that writes without end does not block the caller.
        """
        try:
            data = os.read(self.file, PIPE)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + self._decoder.decode(data)).split("\n")
        for line in lines:
            self._show(line, screen)
        return bool(data)

    def finish(self, screen: Screen) -> None:
        """Show all output so far, including an unfinished line."""
        self.read(screen)
        if self._rest:
            self._show(self._rest, screen)
            self._rest = ""

    def _show(self, line: str, screen: Screen) -> None:
        screen.line(self.rank, line.rstrip("\r").rpartition("\r")[2], self.is_error)  # as a terminal shows it
