"""The output: paragraphs and tables as plain text, in at most 80 columns, and errors of one sentence."""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 80  # columns, at most


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its head; lines are separated by "\\n".
        width: in characters; longer cells of the last column are wrapped, others are not cut.
        right: whether cells stand on the right, as numbers do.
    """

    name: str
    width: int
    right: bool = False

    def place(self, cell: str) -> str:
        """Return a cell as wide as the column."""
        return cell.rjust(self.width) if self.right else cell.ljust(self.width)


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
        """Print a row; the last cell may take several lines."""
        *first, last = cells
        for i, part in enumerate(textwrap.wrap(last, self._columns[-1].width) or [""]):
            line = [*(first if i == 0 else [""] * len(first)), part]
            placed = (column.place(cell) for column, cell in zip(self._columns, line, strict=True))
            print("  ".join(placed).rstrip(), flush=True)


class Refusal(Exception):
    """A request that cannot be met, in one sentence; `status` is the exit status, 2 for wrong arguments."""

    def __init__(self, sentence: str, status: int = 2) -> None:
        super().__init__(sentence)
        self.status = status
