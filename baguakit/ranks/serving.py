"""The code of a rank: it joins the other ranks, then runs calls until the caller ends.

Functions are pickled by cloudpickle, which takes closures, or by pickle where it is not installed.
"""

import faulthandler
import importlib
import importlib.util
import io
import itertools
import linecache
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from types import CodeType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..arguments import integer, message

T = TypeVar("T")
HOST, LOOPBACKS = "127.0.0.1", ("lo", "lo0")
HEAD = struct.Struct("!Q")  # the length of a message to the caller
BEAT = 0.1  # seconds between two reports of progress


@dataclass(frozen=True)
class Start:
    """The first message to a rank.

    Attributes:
        rank, size: the rank and the number of ranks.
        threads: the number of torch's threads.
        cuda: whether the rank uses a GPU.
        timeout: the seconds that gloo waits for another rank; None for torch's default.
        environment, folder: the caller's environment and working directory.
        port: the port of rank 0; 0 for rank 0 itself, which chooses it and replies with it.
    """

    rank: int
    size: int
    threads: int
    cuda: bool
    timeout: float | None
    environment: dict[str, str]
    folder: str
    port: int = 0


@dataclass(frozen=True)
class Work:
    """The message of a call.

    Attributes:
        number: the number of the call, which the reply repeats.
        path: the caller's `sys.path`.
        sources: the caller's entries of `linecache` for code that is not in a file, such as notebook cells.
        keeping: whether the first argument is the dict that this rank keeps.
        call: the pickled function and its arguments.
    """

    number: int
    path: list[str]
    sources: dict[str, Any]
    keeping: bool
    call: bytes


@dataclass(frozen=True)
class Reply:
    """The reply to a call: a pickled value, or the text of an error."""

    number: int
    value: bytes | None = None
    error: str | None = None


@dataclass(frozen=True)
class Progress:
    """The progress of a loop.

    Attributes:
        number: the number of the call.
        loop: the number of the loop in this process.
        label: the text before the bar.
        done, total: the steps done and in all; `total` is None if it is unknown.
        ended: whether this is the last report of the loop.
    """

    number: int
    loop: int
    label: str
    done: int
    total: int | None
    ended: bool


class RankConnection:
    """The rank's end; several threads may send."""

    def __init__(self, file: int) -> None:
        self._socket, self._lock = socket.socket(fileno=file), threading.Lock()
        self._incoming = self._socket.makefile("rb")
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
            return pickle.load(self._incoming)
        except (EOFError, OSError, pickle.UnpicklingError):  # it ended before or within a message
            os._exit(0)


_connection: RankConnection | None = None
_loops = itertools.count()


def run(control: int, out: int, err: int) -> None:
    """Run a rank until the caller ends; never returns."""
    global _connection
    for file, name, standard in ((out, "stdout", 1), (err, "stderr", 2)):
        os.dup2(file, standard)
        os.close(file)
        lines = os.fdopen(standard, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, lines)  # each of which is written at once
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the caller sends it to ranks that are late
    connection = _connection = RankConnection(control)
    join(connection.receive(), connection)
    kept: dict[str, Any] = {}
    while True:
        work = connection.receive()
        connection.number = work.number
        reply = perform(work, kept)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        connection.send(reply)


def join(start: Start, connection: RankConnection) -> None:
    """Make the default process group with the other ranks."""
    os.environ.clear()
    os.environ.update(start.environment)
    os.environ.update(loopback_only())
    os.chdir(start.folder)
    torch.set_num_threads(start.threads)
    timeout = default_pg_timeout if start.timeout is None else timedelta(seconds=start.timeout)
    store = store_of(start, timeout)
    if start.rank == 0:
        connection.send(store.port)
    os.environ.update(torchrun_variables(start, store.port))
    if start.cuda:
        take_gpu(start)
    backend = "cpu:gloo,cuda:nccl" if start.cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=start.rank, world_size=start.size, timeout=timeout)


def loopback_only() -> dict[str, str]:
    """Return the variables that keep groups on the loopback: ranks unpickle messages without authentication."""
    loopbacks = [name for _, name in socket.if_nameindex() if name in LOOPBACKS]
    return {f"{library}_SOCKET_IFNAME": name for library in ("GLOO", "NCCL") for name in loopbacks[:1]}


def store_of(start: Start, timeout: timedelta) -> Any:
    """Return the store of rank 0, or a connection to it. It gets a socket, since torch listens on all interfaces."""
    port, listening = start.port, None
    if start.rank == 0:
        server = socket.create_server((HOST, 0))
        port, listening = server.getsockname()[1], server.detach()
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make(
        HOST, port, is_master=start.rank == 0, wait_for_workers=False, timeout=timeout, master_listen_fd=listening
    )


def torchrun_variables(start: Start, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets."""
    rank, size = str(start.rank), str(start.size)
    ranks = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {**ranks, "MASTER_ADDR": HOST, "MASTER_PORT": str(port)}


def take_gpu(start: Start) -> None:
    """Use the GPU of this rank; ranks share GPUs if there are fewer."""
    gpus = torch.cuda.device_count()
    if gpus < start.size:
        del os.environ["LOCAL_RANK"]  # a DeviceMesh would use it as the number of a GPU
        # NCCL refuses two ranks on one GPU unless they name different hosts; it then uses its network transport.
        os.environ.update(NCCL_HOSTID=str(start.rank), NCCL_ALGO="Ring", NCCL_PROTO="Simple")
        os.environ.update(NCCL_MAX_NCHANNELS="2", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MNNVL_ENABLE="0")
    torch.cuda.set_device(start.rank % gpus)


def perform(work: Work, kept: dict[str, Any]) -> Reply:
    """Call the function, and return its value or its error."""
    try:
        sys.path[:] = work.path
        linecache.cache.update(work.sources)
        function, args = pickle.loads(work.call)
        value = call(function, ([kept] if work.keeping else []) + list(args))
    except BaseException as error:
        return Reply(work.number, error=traceback_of(error))
    try:
        return Reply(work.number, value=dumps(value))
    except Exception as error:
        message = f"TypeError: the result of the function cannot be sent ({error}); return tensors, numbers or text"
        return Reply(work.number, error=message)


def call(function: Callable[..., Any], args: list[Any]) -> Any:
    """Call the function; its frame marks in a traceback the beginning of the user's code."""
    return function(*args)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error, without the frames of this package."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not call.__code__:
        trace = trace.tb_next
    begin = error.__traceback__ if trace is None else trace.tb_next
    return "".join(traceback.format_exception(type(error), error, begin)).rstrip()


def progress(steps: Iterable[T], label: str = "", total: int | None = None) -> Iterator[T]:
    """Yield from `steps`, and show a progress bar for each rank in the caller's process.

    Outside of `Ranks.run` it only yields, so that the same function runs under torchrun.

    Args:
        steps: the iterable.
        label: the text before the bar, after the rank.
        total: the number of steps, if `steps` has no length.

    Returns:
        An iterator over `steps`.

    Raises:
        ModuleNotFoundError: tqdm, which draws the bars, is not installed.
    """
    if not hasattr(steps, "__iter__") and not hasattr(steps, "__getitem__"):
        raise TypeError(message("steps", "an iterable such as a range or a loader", steps))
    if not isinstance(label, str):
        raise TypeError(message("label", "a string", label))
    total = None if total is None else integer("total", total, 0)
    return iter(steps) if _connection is None else _reported(_connection, steps, label, total)


def _reported(connection: RankConnection, steps: Iterable[T], label: str, total: int | None) -> Iterator[T]:
    if importlib.util.find_spec("tqdm") is None:
        raise ModuleNotFoundError("progress bars need tqdm: pip install tqdm")
    if total is None and isinstance(steps, Sized):
        total = len(steps)
    number, loop, done, last = connection.number, next(_loops), 0, -BEAT
    try:
        for step in steps:
            if time.monotonic() - last >= BEAT:
                last = time.monotonic()
                connection.send(Progress(number, loop, label, done, total, ended=False))
            yield step
            done += 1
    finally:
        connection.send(Progress(number, loop, label, done, total, ended=True))


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
