"""The output of ranks in the caller's process: printed lines with the rank in front, and progress bars."""

import codecs
import os
import sys
from typing import Any, TextIO

from .serving import Progress

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
