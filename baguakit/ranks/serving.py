"""The life of a rank: it meets the others, and then runs what it is sent until the one who sends is gone."""

import faulthandler
import importlib
import importlib.util
import itertools
import linecache
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..arguments import said, whole
from .lines import RanksEnd

T = TypeVar("T")
HOST, LOOPBACKS = "127.0.0.1", ("lo", "lo0")
BEAT = 0.1  # seconds between two reports of progress


@dataclass(frozen=True)
class Start:
    """The first message to a rank.

    Attributes:
        rank, size: which it is, of how many.
        threads: of torch.
        cuda: whether it uses a GPU.
        timeout: seconds that gloo waits for another rank; None means torch's own.
        environment, folder: those of the caller at this moment.
        port: where rank 0 can be met; 0 for rank 0 itself, which chooses and tells it.
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
    """A call.

    Attributes:
        number: of the call; an answer carries it.
        path: where modules are looked for.
        sources: what `linecache` knows of code that is in no file, such as the cells of a notebook.
        keeping: whether the function is given what this rank has kept.
        call: the pickled function and its arguments.
    """

    number: int
    path: list[str]
    sources: dict[str, Any]
    keeping: bool
    call: bytes


@dataclass(frozen=True)
class Answer:
    """The answer to a call: a pickled value, or the text of an error."""

    number: int
    value: bytes | None = None
    error: str | None = None


@dataclass(frozen=True)
class Progress:
    """How far the loop `loop` of a call has come: `done` of `total` steps, if that is known; `ended` says the last."""

    number: int
    loop: int
    label: str
    done: int
    total: int | None
    ended: bool


def pickler() -> Any:
    """Return the module that pickles functions: cloudpickle, which takes closures, or where it is missing pickle."""
    return importlib.import_module("cloudpickle" if importlib.util.find_spec("cloudpickle") else "pickle")


_line: RanksEnd | None = None
_loops = itertools.count()


def live(control: int, out: int, err: int) -> None:
    """All of a rank's life; never returns."""
    global _line
    for file, standard in ((out, 1), (err, 2)):
        os.dup2(file, standard)
        os.close(file)
    sys.stdout, sys.stderr = (written_to(standard) for standard in (1, 2))
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # asked for by a caller that has waited too long
    line = _line = RanksEnd(control)
    meet(line.receive(), line)
    kept: dict[str, Any] = {}
    while True:
        work = line.receive()
        line.number = work.number
        answer = perform(work, kept)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        line.send(answer)


def written_to(file: int) -> TextIO:
    """A file as a stream of text that passes on each line at once."""
    return open(file, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def meet(start: Start, line: RanksEnd) -> None:
    """Make the default process group with the other ranks."""
    os.environ.clear()
    os.environ.update(start.environment)
    os.environ.update(stay_inside())
    os.chdir(start.folder)
    torch.set_num_threads(start.threads)
    timeout = default_pg_timeout if start.timeout is None else timedelta(seconds=start.timeout)
    store = store_of(start, timeout)
    if start.rank == 0:
        line.send(store.port)
    os.environ.update(as_torchrun_would(start, store.port))
    if start.cuda:
        take_gpu(start)
    backend = "cpu:gloo,cuda:nccl" if start.cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=start.rank, world_size=start.size, timeout=timeout)


def stay_inside() -> dict[str, str]:
    """The variables that keep groups on the loopback: what comes over gloo is unpickled, and nobody signs it."""
    inside = [name for _, name in socket.if_nameindex() if name in LOOPBACKS]
    return {f"{library}_SOCKET_IFNAME": name for library in ("GLOO", "NCCL") for name in inside[:1]}


def store_of(start: Start, timeout: timedelta) -> Any:
    """Rank 0's store, or a way to it. torch would listen on all interfaces; so it is given a socket that listens."""
    port, listening = start.port, None
    if start.rank == 0:
        door = socket.create_server((HOST, 0))
        port, listening = door.getsockname()[1], door.detach()
    make: Any = dist.TCPStore  # type: ignore[attr-defined]
    return make(
        HOST, port, is_master=start.rank == 0, wait_for_workers=False, timeout=timeout, master_listen_fd=listening
    )


def as_torchrun_would(start: Start, port: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    rank, size = str(start.rank), str(start.size)
    told = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {**told, "MASTER_ADDR": HOST, "MASTER_PORT": str(port)}


def take_gpu(start: Start) -> None:
    """Use the GPU of this rank; where they are too few, ranks share them."""
    gpus = torch.cuda.device_count()
    if gpus < start.size:
        del os.environ["LOCAL_RANK"]  # a DeviceMesh would take it for the number of a GPU
        # NCCL refuses two ranks on one GPU unless each claims a host of its own; it then talks over its network code.
        os.environ.update(NCCL_HOSTID=str(start.rank), NCCL_ALGO="Ring", NCCL_PROTO="Simple")
        os.environ.update(NCCL_MAX_NCHANNELS="2", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_MNNVL_ENABLE="0")
    torch.cuda.set_device(start.rank % gpus)


def perform(work: Work, kept: dict[str, Any]) -> Answer:
    """Call the function, and answer with its value or its error."""
    try:
        sys.path[:] = work.path
        linecache.cache.update(work.sources)
        function, args = pickle.loads(work.call)
        value = call(function, ([kept] if work.keeping else []) + list(args))
    except BaseException as error:
        return Answer(work.number, error=told(error))
    try:
        return Answer(work.number, value=pickler().dumps(value))
    except Exception as error:
        return Answer(
            work.number,
            error=f"TypeError: what the function returned cannot be sent ({error}); return tensors, numbers or text",
        )


def call(function: Callable[..., Any], args: list[Any]) -> Any:
    """A frame that marks in a traceback where the function begins."""
    return function(*args)


def told(error: BaseException) -> str:
    """The traceback of an error, from the function on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not call.__code__:
        trace = trace.tb_next
    begin = error.__traceback__ if trace is None else trace.tb_next
    return "".join(traceback.format_exception(type(error), error, begin)).rstrip()


def progress(steps: Iterable[T], label: str = "", total: int | None = None) -> Iterator[T]:
    """Yield from `steps`; inside of `Ranks.run` the caller sees a bar, one for each rank whose loop this is.

    Elsewhere it only yields, so that the same function runs under torchrun.

    Args:
        steps: what to go through.
        label: stands before the bar, behind the rank.
        total: how many steps there are, if `steps` has no length.

    Raises:
        ModuleNotFoundError: tqdm, which draws the bars, is missing.
    """
    if not hasattr(steps, "__iter__") and not hasattr(steps, "__getitem__"):
        raise TypeError(said("steps", "something to go through, such as a range or a loader", steps))
    if not isinstance(label, str):
        raise TypeError(said("label", "a string", label))
    total = None if total is None else whole("total", total, 0)
    return iter(steps) if _line is None else _shown(_line, steps, label, total)


def _shown(line: RanksEnd, steps: Iterable[T], label: str, total: int | None) -> Iterator[T]:
    if importlib.util.find_spec("tqdm") is None:
        raise ModuleNotFoundError("progress bars need tqdm: pip install tqdm")
    if total is None and isinstance(steps, Sized):
        total = len(steps)
    number, loop, done, last = line.number, next(_loops), 0, -BEAT
    try:
        for step in steps:
            if time.monotonic() - last >= BEAT:
                last = time.monotonic()
                line.send(Progress(number, loop, label, done, total, ended=False))
            yield step
            done += 1
    finally:
        line.send(Progress(number, loop, label, done, total, ended=True))
