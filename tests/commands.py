"""The shell commands that documents and programs tell their readers to run."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "bench/**/*.md")
PROGRAMS = (
    "noxfile.py",
    *(f"{folder}/**/*.py" for folder in ("examples", "bench", "notebooks", "scripts", "baguakit")),
)
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELL = ("bash", "sh", "shell", "console")
VARIABLES = r"(?:[A-Z_]+=\S+ )*"
PROGRAM = r"(?:make|nox|python3?|torchrun|pytest|pip|baguakit|export|scripts/\w+)"
STARTS = re.compile(rf"{VARIABLES}(?:\$ |sudo )*(?:\.venv/bin/)?{PROGRAM}(?: |$)")


@dataclass(frozen=True)
class Command:
    """A line for a shell.

    Attributes:
        where: the file that has it.
        text: the line, without prompt and comment.
        exported: variables that the same block sets before it.
    """

    where: str
    text: str
    exported: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        """Its words, with neither `sudo` nor the folder of programs; what stands in brackets is left away."""
        plain = re.sub(r"\[[^]]*\]", "", self.text).replace(".venv/bin/", "").removeprefix("sudo ")
        return shlex.split(plain)

    @property
    def options(self) -> set[str]:
        """The long options in it, those in brackets too, up to a lone `--`."""
        return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", self.text.split(" -- ")[0]))


def documented() -> list[Command]:
    """Return the commands of all documents, in their order."""
    found = [command for path in files(PAGES) for command in of_page(path.relative_to(ROOT), path.read_text())]
    for path in files(PROGRAMS):
        text = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        # A formatter takes the indentation from lines that are all indented.
        text = re.sub(r"^(?=(?:python3?|torchrun|pytest) \S)", "    ", text, flags=re.MULTILINE)
        found += of_text(str(path.relative_to(ROOT)), text)
    return found


def files(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of some patterns; nothing that has been built."""
    every = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [path for path in every if "_build" not in path.parts]


def blocks_of(path: Path, kind: str = "python") -> list[str]:
    """Return the blocks of a kind in a Markdown page."""
    return [block for found, block in FENCED.findall(path.read_text()) if found == kind]


def of_page(where: Path, text: str) -> Iterator[Command]:
    """Yield the commands of a Markdown page: each line of its shell blocks, then those of its text."""
    for kind, block in FENCED.findall(text):
        if kind in SHELL:
            yield from of_lines(str(where), [(line, True) for line in logical(block)])
    yield from of_text(str(where), FENCED.sub("", text))


def of_text(where: str, text: str) -> Iterator[Command]:
    """Yield indented lines and code in backticks that begin as a command does; in backticks it needs an argument."""
    for paragraph in re.findall(r"(?:^    .*\n?)+", text, re.MULTILINE):
        yield from of_lines(where, [(re.split(r"  +", line)[0], False) for line in logical(paragraph)])
    for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text):
        code = re.sub(r"\s+", " ", code)
        if STARTS.match(code) and " " in code:
            yield Command(where, code)


def of_lines(where: str, lines: list[tuple[str, bool]]) -> Iterator[Command]:
    """Yield the commands among lines; a line that `must` be one is, whatever it begins with."""
    exported: list[str] = []
    for line, must in lines:
        text = re.sub(r"(^|\s+)#.*$", "", line).strip().removeprefix("$ ")
        if text and (must or STARTS.match(text)):
            yield Command(where, text, tuple(exported))
            if text.startswith("export "):
                exported += text.split()[1:]


def logical(block: str) -> list[str]:
    """Return lines without their indentation, with those that a backslash continues in one."""
    return [line.strip() for line in re.sub(r" *\\\n *", " ", block).splitlines()]
