"""The output: paragraphs and tables as plain text, in at most 80 columns, and errors of one sentence."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

WIDTH = 80  # columns, at most


class Column(NamedTuple):
    """A column of a table: its head of one or more lines, its width, and whether cells stand on the right."""

    name: str
    width: int
    right: bool = False


def say(text: str = "", **options: Any) -> None:
    """Print paragraphs, wrapped; lines that begin with a space are kept as they are."""
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    for line in text.split("\n"):
        print(line if line.startswith(" ") else textwrap.fill(line, width), flush=True, **options)


class Table:
    """A table that is printed row by row."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = columns
        heads = [column.name.split("\n") for column in columns]
        height = max(map(len, heads))
        for line in zip(*([""] * (height - len(head)) + head for head in heads), strict=True):
            self.row(*line)
        self.row(*("-" * column.width for column in columns))

    def row(self, *cells: str) -> None:
        """Print a row. A last cell that is too long takes several lines; others are not cut."""
        for part in textwrap.wrap(cells[-1], self._columns[-1].width) or [""]:
            line = zip([*cells[:-1], part], self._columns, strict=True)
            placed = (cell.rjust(width) if right else cell.ljust(width) for cell, (_, width, right) in line)
            print("  ".join(placed).rstrip(), flush=True)
            cells = ("",) * len(cells)


class Refusal(Exception):
    """A request that cannot be met, in one sentence; `status` is the exit status, 2 for wrong arguments."""

    def __init__(self, sentence: str, status: int = 2) -> None:
        super().__init__(sentence)
        self.status = status
