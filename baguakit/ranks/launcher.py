"""The launcher: a process that imports the libraries of ranks once, and forks the ranks.

Importing torch takes seconds; forking takes milliseconds. The user's process is not forked, since it may have threads,
CUDA or a notebook kernel. The fork server of multiprocessing is not used, since its children run the user's script
again. The launcher runs in its own session, so that a keyboard interrupt reaches the user's process only. When the
user's process ends for any reason, its end of the socket closes: the launcher then ends all ranks and itself. If the
launcher is killed, its ranks end too.
"""

import atexit
import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence

from .serving import receive, run, send

PRELOADED = ("numpy", "torch", "torch.distributed", "torch._dynamo", "baguakit")
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
        self._owner, self._used = os.getpid(), False
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        """True if the launcher runs, and this process started it."""
        return self._socket.fileno() >= 0 and self._owner == os.getpid() and self._process.poll() is None

    def fork(self, control: socket.socket, files: Sequence[int]) -> int:
        """Start a rank with `files`, the arguments of `serving.run`; return its process id, told over `control`."""
        try:
            self._used = True
            send(pickle.dumps(()), [self._socket], files)
            return int(pickle.loads(receive(control)[0]))
        except (EOFError, OSError) as error:
            raise RuntimeError(
                "the process that launches ranks has ended; its error, if any, is above (on stderr)"
            ) from error

    def end(self, pids: Iterable[int]) -> None:
        """Kill ranks, and wait until they have ended. If the launcher has ended, so have its ranks."""
        ended, theirs = os.pipe()
        with os.fdopen(ended, "rb") as file, contextlib.suppress(OSError):
            with os.fdopen(theirs, "wb"):
                send(pickle.dumps(tuple(pids)), [self._socket], [theirs])
            file.read()  # the launcher closes it

    def close(self) -> None:
        """End all ranks and the launcher."""
        atexit.unregister(self.close)
        self._socket.close()
        if self._owner == os.getpid():
            if not self._used:  # it has no ranks, and may still be importing
                self._process.kill()
            self._process.wait()


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
    """Run the launcher in its own process, until the user's process ends.

    A message is the process ids of ranks to end, and a file to close then; or none, and the files of a rank to start.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    user, children = socket.socket(fileno=socket_file), set[int]()
    while True:
        try:
            packed, files = receive(user)
        except (EOFError, OSError):
            break
        if pids := pickle.loads(packed):
            _end(children, pids)
        else:
            children.add(_fork(user, files))
        for file in files:
            os.close(file)
    _end(children, list(children))


def _fork(user: socket.socket, files: Sequence[int]) -> int:
    parent, pid = os.getpid(), os.fork()
    if pid:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(files[0])) as control:
            send(pickle.dumps(pid), [control])
        return pid
    try:
        user.close()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != parent:  # it ended before the call
                os._exit(1)
        run(*files)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _end(children: set[int], pids: Sequence[int]) -> None:
    """Kill some children. An ended one keeps its process id until waitpid, so that this never kills another process."""
    ours = children.intersection(pids)
    for pid in ours:
        os.kill(pid, signal.SIGKILL)
    for pid in ours:
        os.waitpid(pid, 0)
    children -= ours
