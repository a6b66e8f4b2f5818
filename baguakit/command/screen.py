"""The output: paragraphs and tables as plain text, in at most 80 columns, and errors of one sentence."""

import shutil
import textwrap
from collections.abc import Mapping
from typing import Any

WIDTH = 80  # columns, at most


def say(text: str = "", **options: Any) -> None:
    """Print paragraphs, wrapped; lines that begin with a space are kept as they are."""
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    for line in text.split("\n"):
        print(line if line.startswith(" ") else textwrap.fill(line, width), flush=True, **options)


class Table:
    """A table that is printed row by row.

    Args:
        columns: the head of each column, of one or more lines, and how its cells are formatted: "<28" or ">10".
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._formats = list(columns.values())
        self._widths = [int(each[1:]) for each in self._formats]
        height = max(head.count("\n") for head in columns)
        heads = ("\n" * (height - head.count("\n")) + head for head in columns)
        for line in zip(*(head.split("\n") for head in heads), strict=True):
            self.row(*line)
        self.row(*("-" * width for width in self._widths))

    def row(self, *cells: str) -> None:
        """Print a row. A last cell that is too long takes several lines; others are not cut."""
        for part in textwrap.wrap(cells[-1], self._widths[-1]) or [""]:
            print("  ".join(map(format, [*cells[:-1], part], self._formats)).rstrip(), flush=True)
            cells = ("",) * len(cells)


class Refusal(Exception):
    """A request that cannot be met, in one sentence; `status` is the exit status, 2 for wrong arguments."""

    def __init__(self, sentence: str, status: int = 2) -> None:
        super().__init__(sentence)
        self.status = status
