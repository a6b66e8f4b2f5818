"""The messages between a caller, its launcher and its ranks.

A message is a pickle in a file in memory; a socket carries the descriptor of the file. It is whole when it arrives,
whatever its size, so that no process waits for one that is stopped or dies in the middle. Functions are pickled by
cloudpickle, which takes closures, or by pickle where it is not installed.
"""

import importlib
import importlib.util
import io
import mmap
import os
import pickle
import socket
import sys
import tempfile
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType
from typing import Any

FILES = 5  # the most descriptors of a message: its own, and what a rank that starts is given


@dataclass(frozen=True)
class Reply:
    """The result of a call: its value, or the text of an error."""

    value: Any = None
    error: str | None = None


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
