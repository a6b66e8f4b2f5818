"""The launcher: a process that has imported what ranks need, and forks them.

To import torch takes seconds, and to fork takes none. The user's own process is not forked, since it may hold threads,
CUDA or the kernel of a notebook; nor does multiprocessing's fork server do, since each of its children runs the user's
script once more. The launcher leads a session of its own, so that an interrupt at the keyboard reaches the user's
process and no rank. However that process ends, its end of the socket closes: then the launcher ends all ranks, and
itself. Should the launcher be killed, its ranks go with it.
"""

import atexit
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

PRELOADED = ("numpy", "torch", "torch.distributed", "torch._dynamo", "baguakit")
FORK, END, ALIVE = range(3)
REQUEST, ANSWER = struct.Struct("<3q"), struct.Struct("<2q")  # number, what, process id; number, answer
FILES = 3  # that a rank is given
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


class Launcher:
    """The launcher, as seen by the process that asks it. Ask `launcher()` for the one that there is."""

    def __init__(self) -> None:
        if not hasattr(os, "fork"):
            raise OSError(f"live ranks are forked, which {sys.platform} cannot do; start the program with torchrun")
        self._door, theirs = socket.socketpair()
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
        self._asked = False
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        """Whether it runs, and this process is the one that started it."""
        return self._door.fileno() >= 0 and self._owner == os.getpid() and self._process.poll() is None

    def fork(self, files: Sequence[int]) -> int:
        """Make a rank, which is given `files`: its control socket, and where its stdout and stderr go."""
        return self._ask(FORK, 0, files)

    def end(self, pid: int) -> None:
        """Kill a rank, and wait until it has ended. Without a launcher there is no rank either."""
        if self.usable:
            with contextlib.suppress(RuntimeError):
                self._ask(END, pid)

    def alive(self, pid: int) -> bool:
        """Whether a rank runs."""
        return self.usable and bool(self._ask(ALIVE, pid))

    def close(self) -> None:
        """End all ranks, and the launcher."""
        atexit.unregister(self.close)
        self._door.close()
        if self._owner == os.getpid():
            if not self._asked:  # it has no ranks, and may still be importing
                self._process.kill()
            self._process.wait()

    def _ask(self, what: int, pid: int, files: Sequence[int] = ()) -> int:
        with self._lock:
            number, self._asked = next(self._numbers), True
            try:
                socket.send_fds(self._door, [REQUEST.pack(number, what, pid)], files)
                while True:
                    data = self._door.recv(ANSWER.size)
                    if not data:
                        raise ConnectionError("the launcher is gone")
                    answered, answer = ANSWER.unpack(data)
                    if answered == number:  # others are those of questions that were interrupted
                        return int(answer)
            except OSError as error:
                raise RuntimeError(
                    "the process that launches ranks has ended; if it said why, that is above (on stderr)"
                ) from error


_launcher: Launcher | None = None


def launcher() -> Launcher:
    """The launcher of this process, started if there is none. It is ready some seconds later; asking it waits."""
    global _launcher
    if _launcher is not None and not _launcher.usable:
        _launcher.close()
        _launcher = None
    if _launcher is None:
        _launcher = Launcher()
    return _launcher


def serve(door_file: int) -> None:
    """The life of the launcher, in its own process."""
    for name in PRELOADED:
        importlib.import_module(name)
    door = socket.socket(fileno=door_file)
    pids: set[int] = set()
    while True:
        message, files, _, _ = socket.recv_fds(door, REQUEST.size, FILES)
        if not message:
            break
        number, what, pid = REQUEST.unpack(message)
        if what == FORK:
            answer = _fork(door, files)
            pids.add(answer)
        elif what == END:
            answer = _end(pids, pid)
        else:
            answer = _alive(pids, pid)
        door.sendall(ANSWER.pack(number, answer))
    for pid in list(pids):
        os.kill(pid, signal.SIGKILL)
    for pid in list(pids):
        _end(pids, pid)


def _fork(door: socket.socket, files: Sequence[int]) -> int:
    parent, pid = os.getpid(), os.fork()
    if pid:
        for file in files:
            os.close(file)
        return pid
    try:
        door.close()
        _die_with(parent)
        from .serving import live

        live(*files)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _die_with(parent: int) -> None:
    """Let this process be killed when its parent ends, where the system can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # it had ended before
            os._exit(1)


# A child that has ended keeps its process id until it is waited for, which happens here alone: no other process is hit.


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
