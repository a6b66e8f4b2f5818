"""The code of a rank: it joins the other ranks, then runs calls until the caller ends.

A message is a pickle in a file in memory; a socket carries the descriptor of the file. It is whole when it arrives,
whatever its size, so that no process waits for one that is stopped or dies in the middle.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import io
import itertools
import linecache
import mmap
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import ChainMap
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
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
BEAT = 0.1  # seconds between two reports of progress
FILES = 5  # the most descriptors of a message: its own, and what a rank that starts is given

_control: socket.socket | None = None  # of a rank: the socket to its caller
_call = 0  # the number of the call that is under way; it changes between calls, too
_loops = itertools.count()


def run(control: int, out: int, err: int, listening: int | None = None) -> None:
    """Run a rank until the caller ends; never returns.

    The arguments are descriptors: of the socket by which the caller sends the arguments of `join`, then of `perform`,
    of stdout and stderr, and for rank 0 of the listening socket of the store.
    """
    global _control, _call
    for file, name, standard in ((out, "stdout", 1), (err, "stderr", 2)):
        os.dup2(file, standard)
        os.close(file)
        lines = os.fdopen(standard, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        setattr(sys, name, lines)  # each of which is written at once
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # the caller sends it to ranks that are late
    _control = socket.socket(fileno=control)
    join(_control, listening, **_next(_control))
    kept: dict[str, Any] = {}
    while True:
        work = _next(_control)
        _call += 1
        answer = perform(kept, **work)
        _call += 1
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        send(answer, [_control])


def _next(control: socket.socket) -> Any:
    """Wait for the next message; end this process if the caller's has ended."""
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
    """Make the default process group with the other ranks; the caller gets a reply when the store is there.

    `environment` is the caller's with the variables that torchrun sets, `folder` its working directory.
    """
    os.environ.clear()
    os.environ.update(environment)
    # Ranks unpickle messages without authentication: groups stay on the loopback.
    loopback = next((name for _, name in socket.if_nameindex() if name in LOOPBACKS), None)
    if loopback:
        os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    os.chdir(folder)
    torch.set_num_threads(threads)
    rank, size, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    limit = default_pg_timeout if timeout is None else timedelta(seconds=timeout)
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = make(HOST, port, is_master=rank == 0, wait_for_workers=False, timeout=limit, master_listen_fd=listening)
    send(dumps(None), [control])
    if cuda:
        gpus = torch.cuda.device_count()
        if gpus < size:  # ranks share them
            del os.environ["LOCAL_RANK"]  # a DeviceMesh would use it as the number of a GPU
            # NCCL refuses two ranks on one GPU unless they name different hosts; it then uses its network transport.
            os.environ.update(NCCL_HOSTID=str(rank), NCCL_ALGO="Ring", NCCL_PROTO="Simple")
            os.environ.update(NCCL_MAX_NCHANNELS="2", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MNNVL_ENABLE="0")
        torch.cuda.set_device(rank % gpus)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def perform(kept: dict[str, Any], path: list[str], sources: dict[str, Any], keep: bool, packed: bytes) -> bytes:
    """Call a pickled function with its arguments, before which `keep` puts `kept`; return its pickled value and error.

    `path` is the caller's `sys.path`, and `sources` its entries of `linecache` for code that is not in a file.
    """
    try:
        sys.path[:] = path
        linecache.cache.update(sources)
        function, args = pickle.loads(packed)
        value = function(kept, *args) if keep else function(*args)
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


def progress(steps: Iterable[T], label: str = "", total: int | None = None) -> Iterator[T]:
    """Yield from `steps`, and show a progress bar for each rank in the caller's process.

    Outside of `Ranks.run` it only yields, so that the same function runs under torchrun.

    Args:
        steps: the iterable.
        label: the text before the bar, after the rank.
        total: the number of steps, if `steps` has no length.

    Raises:
        ModuleNotFoundError: tqdm, which draws the bars, is not installed.
    """
    if not hasattr(steps, "__iter__") and not hasattr(steps, "__getitem__"):
        raise TypeError(message("steps", "an iterable such as a range or a loader", steps))
    if not isinstance(label, str):
        raise TypeError(message("label", "a string", label))
    total = None if total is None else integer("total", total, 0)
    if _control is None:
        return iter(steps)
    if importlib.util.find_spec("tqdm") is None:
        raise ModuleNotFoundError("progress bars need tqdm: pip install tqdm")
    if total is None and isinstance(steps, Sized):
        total = len(steps)
    return _reported(_control, steps, Progress(next(_loops), label, 0, total))


def _reported(control: socket.socket, steps: Iterable[T], report: Progress) -> Iterator[T]:
    """Yield from `steps`, and report to the caller until the call ends: then nobody shows the loop any more."""
    began_in, last = _call, -BEAT
    try:
        for step in steps:
            if time.monotonic() - last >= BEAT and _call == began_in:
                last = time.monotonic()
                send(dumps(report), [control])
            yield step
            report = replace(report, done=report.done + 1)
    finally:
        if _call == began_in:
            send(dumps(replace(report, ended=True)), [control])


# Messages between a rank and its caller


@dataclass(frozen=True)
class Progress:
    """The progress of the loop of this number; `total` is None if it is unknown, `ended` in the last report."""

    loop: int
    label: str
    done: int
    total: int | None
    ended: bool = False


def send(packed: bytes, ends: Sequence[socket.socket], files: Sequence[int] = ()) -> None:
    """Send a pickle to each of some sockets, with descriptors of open files."""
    with (
        os.fdopen(os.memfd_create("message"), "w+b") if sys.platform == "linux" else tempfile.TemporaryFile() as message
    ):
        message.write(packed)
        message.flush()
        for end in ends:
            socket.send_fds(end, [b"m"], [message.fileno(), *files])


def receive(end: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for a message; return the pickle and the descriptors with it. EOFError: the other end is closed."""
    data, files, _, _ = socket.recv_fds(end, 1, FILES)
    if not data:
        raise EOFError
    # It is mapped, since ends that get the same message share one position in the file.
    with os.fdopen(files[0], "rb") as message, mmap.mmap(message.fileno(), 0, access=mmap.ACCESS_READ) as packed:
        return packed[:], list(files[1:])


def takes_closures() -> bool:
    """Return True if cloudpickle is installed."""
    return importlib.util.find_spec("cloudpickle") is not None


def dumps(value: Any) -> bytes:
    """Return a value, pickled."""
    file = io.BytesIO()
    (_pickler() if takes_closures() else pickle.Pickler)(file).dump(value)
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
