"""The processes of a `Ranks`, as their caller sees them, and their output on the caller's screen."""

import os
import resource
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .launcher import Launcher
from .messages import Progress

PIPE = 1 << 20  # the most bytes that a pipe holds, by Linux's default


def check_open_files(size: int) -> None:
    """Raise an OSError if `size` ranks need more open files than a process may have.

    The caller has three for each rank. A rank has a connection to every other one in the default group, and rank 0,
    which holds the store, two or three more from each.
    """
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = Path("/proc/self/fd")
    here = len(list(folder.iterdir())) if folder.exists() else 0
    needed = max(here + 3 * size, 4 * size) + 64  # for everything else
    if needed > most:
        raise OSError(
            f"{size} ranks need up to {needed} open files in a process, and the limit is {most}; "
            f"set it by `ulimit -n {needed}` before the program starts, or start fewer ranks"
        )


class Process:
    """The process of a rank, which starts when this is made, its socket for calls and replies, its output."""

    def __init__(self, rank: int, launcher: Launcher, files: Sequence[int]) -> None:
        self.rank = rank
        self.control, theirs = socket.socketpair()
        (out, their_out), (err, their_err) = os.pipe(), os.pipe()
        self.streams = Stream(out, rank, is_error=False), Stream(err, rank, is_error=True)
        with theirs, os.fdopen(their_out, "wb"), os.fdopen(their_err, "wb"):
            self.pid = launcher.fork(self.control, [theirs.fileno(), their_out, their_err, *files])

    def fileno(self) -> int:
        """Return the descriptor of the control socket, for `wait`."""
        return self.control.fileno()

    def ended(self) -> bool:
        """Return whether the process has closed its end of the control socket."""
        try:
            return not self.control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True


def end(launcher: Launcher, processes: list[Process], owner: int) -> None:
    """End processes, unless this process is one forked from their owner."""
    if owner == os.getpid():
        launcher.end([process.pid for process in processes])
    for process in processes:
        for each in (process.control, *process.streams):
            each.close()
    processes.clear()


class Screen:
    """The output of one call: printed lines with the rank in front, and progress bars."""

    def __init__(self) -> None:
        self._bars: dict[tuple[int, int], Any] = {}

    def line(self, rank: int, text: str, is_error: bool) -> None:
        """Show a line of a rank."""
        stream = sys.stderr if is_error else sys.stdout
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
    """The output of one rank to stdout or stderr: the reading end of a pipe."""

    def __init__(self, file: int, rank: int, is_error: bool) -> None:
        os.set_blocking(file, False)
        self._file, self._rank, self._is_error = os.fdopen(file, "rb", buffering=0), rank, is_error
        self.fileno, self.close = self._file.fileno, self._file.close
        self._rest = b""

    def read(self, screen: Screen, last: bool = False) -> bool:
        """Show the complete lines, and with `last` an unfinished one; return False at the end of the pipe.

        It reads once, at most the size of a pipe, so that a rank that writes without end does not block the caller.
        """
        data = self._file.read(PIPE)  # None if there is nothing
        *lines, self._rest = (self._rest + (data or b"")).split(b"\n")
        if last and self._rest:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            shown = line.rstrip(b"\r").rpartition(b"\r")[2]  # as by a terminal
            screen.line(self._rank, shown.decode(errors="replace"), self._is_error)
        return data != b""
