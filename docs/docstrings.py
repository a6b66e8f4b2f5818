"""Docstrings as they are written in this package, turned into reStructuredText for Sphinx.

They are plain text for people at a prompt: `single backticks` hold code, and an indented paragraph is code or an
equation, in which spaces count. Here a backtick becomes a link where it names something public, a literal elsewhere,
and an indented paragraph a literal block. Sections such as Args are Napoleon's business, which comes after.
"""

import re
from typing import Any

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example|Examples|Note):$")
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def rewritten(lines: list[str]) -> list[str]:
    """The lines of a docstring, as reStructuredText."""
    written: list[str] = []
    literal = section = False
    for i, line in enumerate(lines):
        if SECTION.match(line):
            section = True
        elif line and not line.startswith(" "):
            section = False
        indented = line.startswith("    ") and not section
        begins = indented and not literal and (i == 0 or not lines[i - 1].strip())
        if begins:
            written += ["::", ""]
        literal = indented or (literal and not line.strip())
        written.append(line if literal else _prose(line))
    return written


def _prose(line: str) -> str:
    line = CODE.sub(lambda found: f"``{found[1]}``", line)
    parts = line.split("``")  # what is outside of code may hold characters that mean something to reStructuredText
    return "``".join(part if i % 2 else part.replace("*", r"\*").replace("|", r"\|") for i, part in enumerate(parts))


def _process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    # Napoleon takes what stands before a colon in a property's first line for its type; an empty comment hides it.
    lines[:] = [*(["..", ""] if what in ("property", "attribute") else []), *rewritten(lines)]


def setup(app: Any) -> dict[str, Any]:
    """Come before Napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", _process, priority=400)
    return {"parallel_read_safe": True}
