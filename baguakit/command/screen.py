"""Print paragraphs and tables as plain text of at most 80 columns. `Refusal` is an error of one sentence."""

import contextlib
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

WIDTH = 80  # columns, at most


def say(text: str = "", **options: Any) -> None:
    """Print each line of `text` as a wrapped paragraph; print lines that begin with a space unchanged."""
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    for line in text.split("\n"):
        print(line if line.startswith(" ") else textwrap.fill(line, width), flush=True, **options)


class Table:
    """A table that is printed row by row. `columns` is {head, of one or more lines: format, such as "<28" or ">10"}."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._formats = list(columns.values())
        self._widths = [int(each[1:]) for each in self._formats]
        height = max(head.count("\n") for head in columns)
        heads = ("\n" * (height - head.count("\n")) + head for head in columns)
        for line in zip(*(head.split("\n") for head in heads), strict=True):
            self.row(*line)
        self.row(*("-" * width for width in self._widths))

    def row(self, *cells: str) -> None:
        """Print a row. Wrap the last cell if it is too long; print all other cells in full."""
        for part in textwrap.wrap(cells[-1], self._widths[-1]) or [""]:
            print("  ".join(map(format, [*cells[:-1], part], self._formats)).rstrip(), flush=True)
            cells = ("",) * len(cells)


class Refusal(Exception):
    """An error that the command prints as one sentence. The command exits with `status`: 2 for wrong arguments."""

    def __init__(self, sentence: str, status: int = 2) -> None:
        super().__init__(sentence)
        self.status = status


@contextlib.contextmanager
def refusing(status: int = 2, also: type[Exception] = OSError) -> Iterator[None]:
    """Raise an OSError, TypeError, ValueError, or an `also` as a Refusal; for a `with` block, or a decorator."""
    try:
        yield
    except (OSError, TypeError, ValueError, also) as error:
        raise Refusal(str(error), status) from error
