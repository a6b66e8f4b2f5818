"""Tables and progress bars in a terminal by rich, and as plain text without it or without a terminal."""

import importlib.util
import os
import shutil
import sys
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


def say(text: str = "", **options: Any) -> None:
    """Print paragraphs, wrapped; lines that begin with a space are kept as they are."""
    for line in text.split("\n"):
        print(line if line.startswith(" ") else textwrap.fill(line, width()), flush=True, **options)


def width() -> int:
    """Return the number of columns to use."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def rich_terminal() -> bool:
    """Return whether the output is a terminal that rich can draw in."""
    drawable = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", None)
    return drawable and importlib.util.find_spec("rich") is not None


class Table:
    """A table that grows row by row, with a progress bar below it in a terminal. A context manager.

    Args:
        columns: its columns.
        total: the steps of the work that fills the table; 0 for no progress bar.
        silent: show nothing: this process is not rank 0.
    """

    def __init__(self, columns: Sequence[Column], total: int = 0, silent: bool = False) -> None:
        make = Silent if silent else Rich if rich_terminal() else Plain
        self._shown: Any = make(columns, total)

    def row(self, *cells: str, style: str = "") -> None:
        """Add a row; rich draws it in a style such as "bold"."""
        self._shown.row(cells, style)

    def step(self, label: str, count: int = 1) -> None:
        """Move the progress bar by `count` steps, and name the work that is going on."""
        self._shown.step(label, count)

    def __enter__(self) -> "Table":
        self._shown.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()


class Silent:
    """A table that is not shown."""

    def __init__(self, columns: Sequence[Column], total: int) -> None:
        self.columns, self.total = columns, total

    def open(self) -> None:
        """Begin."""

    def row(self, cells: Sequence[str], style: str) -> None:
        """Add a row."""

    def step(self, label: str, count: int) -> None:
        """Move on."""

    def close(self) -> None:
        """End."""


class Plain(Silent):
    """A table as lines of text, printed as they come."""

    def open(self) -> None:
        """Print the head, and a rule below it."""
        heads = [column.name.split("\n") for column in self.columns]
        height = max(map(len, heads))
        for line in zip(*([""] * (height - len(head)) + head for head in heads), strict=True):
            self.row(line, "")
        print("  ".join("-" * column.width for column in self.columns), flush=True)

    def row(self, cells: Sequence[str], style: str) -> None:
        """Print a row; the last cell may take several lines."""
        *first, last = cells
        wrapped = textwrap.wrap(last, self.columns[-1].width) or [""]
        for i, part in enumerate(wrapped):
            line = [*(first if i == 0 else [""] * len(first)), part]
            print("  ".join(map(placed, line, self.columns)).rstrip(), flush=True)


def placed(cell: str, column: Column) -> str:
    """Return a cell as wide as its column."""
    return cell.rjust(column.width) if column.right else cell.ljust(column.width)


class Rich(Silent):
    """A table that rich draws, with a progress bar below it until it is complete."""

    def open(self) -> None:
        """Begin to draw."""
        from rich import box
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Table as Drawn

        self.table = Drawn(
            box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False, header_style="bold"
        )
        for column in self.columns:
            side: Any = "right" if column.right else "left"
            self.table.add_column(column.name, justify=side, width=column.width, vertical="top")
        parts = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
        self.progress = Progress(*parts, TimeElapsedColumn())
        self.task = self.progress.add_task("", total=self.total, visible=self.total > 0)
        self.live = Live(Group(self.table, self.progress), console=Console(width=width()), refresh_per_second=4)
        self.live.start()

    def row(self, cells: Sequence[str], style: str) -> None:
        """Add a row."""
        from rich.text import Text

        self.table.add_row(*map(Text, cells), style=style)

    def step(self, label: str, count: int) -> None:
        """Move the progress bar."""
        self.progress.update(self.task, advance=count, description=label)

    def close(self) -> None:
        """Take the bar away; the table stays."""
        self.progress.update(self.task, visible=False)
        self.live.stop()
