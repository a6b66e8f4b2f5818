"""The processes of `Ranks`: the launcher, which is a process that forks ranks; the code of a rank; and messages.

Importing torch takes seconds and forking takes milliseconds, so the launcher imports torch once and forks each rank.
The user's process is not forked, since it may have threads, CUDA or a notebook kernel. The fork server of
multiprocessing is not used, since its children run the user's script again. The launcher runs in its own session, so
that a keyboard interrupt reaches the user's process only. When the user's process ends, its socket to the launcher
closes, and the launcher kills all ranks and exits. On Linux, the ranks also end if the launcher is killed.

A message is a pickle in a temporary file, and a socket passes the descriptor of this file. So a message of any size
arrives whole, and no process waits for the rest of a message whose sender was stopped or has died.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.util
import io
import linecache
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections import ChainMap
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

PRELOADED = ("numpy", "torch", "torch.distributed", "torch._dynamo", "baguakit")
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl
HOST, LOOPBACKS = "127.0.0.1", ("lo", "lo0")
FILES = 5  # the most descriptors of a message: its own, and the files of a new rank


def run(control: int, out: int, err: int, listening: int | None = None) -> None:
    """Run a rank until the caller's process ends; never return.

    All arguments are file descriptors. `control` is the socket on which the caller sends the arguments of `join` and
    then of `perform`. `out` and `err` become stdout and stderr. On rank 0, `listening` is the socket of the store.
    """
    for file, name, standard in ((out, "stdout", 1), (err, "stderr", 2)):
        os.dup2(file, standard)
        os.close(file)
        lines = os.fdopen(standard, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, lines)  # each line is written at once
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the caller sends it to ranks that are late
    caller = socket.socket(fileno=control)
    join(caller, listening, **_next(caller))
    while True:
        answer = perform(**_next(caller))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        send(answer, caller)


def _next(control: socket.socket) -> Any:
    """Wait for the next message of the caller, and return it; exit if the caller's process has ended."""
    try:
        return pickle.loads(receive(control)[0])
    except (EOFError, OSError):
        os._exit(0)


def join(
    control: socket.socket,
    listening: int | None,
    environment: dict[str, str],
    folder: str,
    threads: int,
    cuda: bool,
    timeout: float | None,
) -> None:
    """Make the default process group with the other ranks. Reply to the caller once the store is ready.

    `environment` is the caller's environment, with the variables of torchrun; `folder` is the caller's directory.
    """
    os.environ.clear()
    os.environ.update(environment)
    # Ranks unpickle messages without authentication, so groups use the loopback interface only.
    loopback = next((name for _, name in socket.if_nameindex() if name in LOOPBACKS), None)
    if loopback:
        os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    os.chdir(folder)
    torch.set_num_threads(threads)
    rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    limit = default_pg_timeout if timeout is None else timedelta(seconds=timeout)
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make(HOST, port, is_master=rank == 0, wait_for_workers=False, timeout=limit, master_listen_fd=listening)
    send(dumps(None), control)
    if cuda:
        gpus = torch.cuda.device_count()
        if gpus < size:  # ranks share them
            del os.environ["LOCAL_RANK"]  # a DeviceMesh would use it as the number of a GPU
            # NCCL refuses two ranks on one GPU unless they name different hosts. NCCL then uses its network transport.
            os.environ.update(NCCL_HOSTID=str(rank), NCCL_ALGO="Ring", NCCL_PROTO="Simple")
            os.environ.update(NCCL_MAX_NCHANNELS="2", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MNNVL_ENABLE="0")
        torch.cuda.set_device(rank % gpus)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def perform(path: list[str], sources: dict[str, Any], packed: bytes) -> bytes:
    """Unpickle (function, args) and call the function; return the pickled (value, None) or (None, traceback).

    `path` is the caller's `sys.path`. `sources` are the caller's `linecache` entries of code that is not in a file.
    """
    try:
        sys.path[:] = path
        linecache.cache.update(sources)
        function, args = pickle.loads(packed)
        value = function(*args)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:  # the user's code begins after it
            trace = trace.tb_next
        return dumps((None, "".join(traceback.format_exception(type(error), error, trace)).rstrip()))
    try:
        return dumps((value, None))
    except Exception as error:
        sentence = f"TypeError: the result of the function cannot be sent ({error}); return tensors, numbers or text"
        return dumps((None, sentence))


# The launcher


class Launcher:
    """A handle of the launcher process: it starts the process and sends requests. `launcher()` returns the handle."""

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
        """Fork a rank, which calls `run(*files)`; return its process id, which the launcher sends over `control`."""
        try:
            self._used = True
            send(pickle.dumps(()), self._socket, files)
            return int(pickle.loads(receive(control)[0]))
        except (EOFError, OSError) as error:
            raise RuntimeError("the process that launches ranks has ended; any error is above (on stderr)") from error

    def end(self, pids: Iterable[int]) -> None:
        """Kill the ranks with the process ids `pids`, and wait for their end. Do nothing if the launcher has ended."""
        if not (pids := tuple(pids)):  # as after an interrupt in the first fork; an empty message would fork a rank
            return
        ended, theirs = os.pipe()
        with os.fdopen(ended, "rb") as file, contextlib.suppress(OSError):
            with os.fdopen(theirs, "wb"):
                send(pickle.dumps(pids), self._socket, [theirs])
            file.read()  # the launcher closes it

    def close(self) -> None:
        atexit.unregister(self.close)
        self._socket.close()
        if self._owner == os.getpid():
            if not self._used:  # it has no ranks, and may still be importing
                self._process.kill()
            self._process.wait()


_launcher: Launcher | None = None


def launcher() -> Launcher:
    """Return the handle of this process's launcher; start a launcher if none runs. Requests wait until it is ready."""
    global _launcher
    if _launcher is None or not _launcher.usable:
        if _launcher is not None:
            _launcher.close()
        _launcher = Launcher()
    return _launcher


def serve(socket_file: int) -> None:
    """Run the launcher in its own process, until the user's process ends.

    For a message without process ids, fork a rank, which gets the files of the message. For a message with ids, kill
    these ranks, then close the file of the message.
    """
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # ranks collect no garbage among the modules, whose memory they share
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
            send(pickle.dumps(pid), control)
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
    """Kill those `children` whose ids are in `pids`. No other process can have such an id before waitpid returns."""
    ours = children.intersection(pids)
    for pid in ours:
        os.kill(pid, signal.SIGKILL)
    for pid in ours:
        os.waitpid(pid, 0)
    children -= ours


# Messages between a rank and its caller


def send(packed: bytes, end: socket.socket, files: Sequence[int] = ()) -> None:
    """Send a pickle and the open file descriptors `files` over the socket `end`."""
    with (
        os.fdopen(os.memfd_create("message"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile() as message
    ):
        message.write(packed)
        message.seek(0)  # which flushes; the receiver's descriptor shares the position
        socket.send_fds(end, [b"m"], [message.fileno(), *files])


def receive(end: socket.socket) -> tuple[bytes, list[int]]:
    """Return the pickle and the descriptors of the next message; raise EOFError if the other end is closed."""
    data, files, _, _ = socket.recv_fds(end, 1, FILES)
    if not data:
        raise EOFError
    with os.fdopen(files[0], "rb") as message:
        return message.read(), files[1:]


def takes_closures() -> bool:
    return importlib.util.find_spec("cloudpickle") is not None


def dumps(value: Any) -> bytes:
    """Return the pickle of a value, made with cloudpickle if it is installed."""
    file = io.BytesIO()
    (_pickler() if takes_closures() else Pickler)(file).dump(value)
    return file.getvalue()


class Pickler(pickle.Pickler):
    """A pickler that refuses what the program itself defines: the ranks run another program."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise TypeError("what the program itself defines must stand in a module")
        return NotImplemented


@cache
def _pickler() -> Any:
    """Return cloudpickle's Pickler, changed to keep the file names of code for tracebacks (3.1.3 drops the names)."""
    kind: Any = importlib.import_module("cloudpickle").Pickler

    def reduced(code: CodeType) -> tuple[Any, ...]:
        make, parts, *more = kind.dispatch_table[CodeType](code)
        named = (code.co_filename if isinstance(part, str) and part == "<dynamic-code>" else part for part in parts)
        return (make, tuple(named), *more)

    return type("Pickler", (kind,), {"dispatch_table": ChainMap({CodeType: reduced}, kind.dispatch_table)})
