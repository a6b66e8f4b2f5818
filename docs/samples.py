"""Run the commands of docs/command.md, and write what they print below them.

    python docs/samples.py               all
    python docs/samples.py demo plan     those with one of these words

A sample is a block of text after a block of one command. It is what a machine printed, with its measurements; the page
says which machine. `tests/test_samples.py` compares all but the measurements with what the commands print now.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "command.md"
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The page shows long outputs from this line on, and of their tables the rows that begin with one of these words.
BEGIN = {"python -m bench.speed": "Each operation"}
ROWS = {"python -m bench.speed": ("MinMaxUInt8()", "UInt4()", "mixing", "top-k", "optimizer")}


@dataclass(frozen=True)
class Sample:
    """A command, the output that the page shows, and where in the page it stands."""

    command: str
    output: str
    begin: int
    end: int


def samples(page: str) -> Iterator[Sample]:
    """Yield the samples of a page, in order."""
    command = ""
    for found in FENCED.finditer(page):
        if found[1] == "text" and command:
            yield Sample(command, found[2], *found.span(2))
        command = found[2].strip() if found[1] == "bash" and found[2].count("\n") == 1 else ""


def printed(command: str, *more: str) -> str:
    """Return what a command prints, in a folder that has the page's programs, cut as on the page."""
    with tempfile.TemporaryDirectory() as folder:
        for kind, code in FENCED.findall(PAGE.read_text()):
            if kind == "python" and (name := re.match(r"# (\w+\.py)\n", code)):
                Path(folder, name[1]).write_text(code)
        here = str(Path(sys.executable).parent)
        paths = {"PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{folder}", "HOME": str(Path.home())}
        words = [*one_machine(command).split(), *more]
        ran = subprocess.run(words, cwd=folder, env=paths, stdout=subprocess.PIPE, text=True, check=True)
        text = ran.stdout.replace(str(Path(folder).resolve()), "/home/me")
    return cut(command, text.replace(str(Path.home()), "/home/me"))


def one_machine(command: str) -> str:
    """Return a command for two machines as one for four ranks of this one."""
    several = r"torchrun --nnodes=2 --node_rank=0 --nproc_per_node=1 --master_addr=HOST --master_port=\d+"
    return re.sub(several, "torchrun --standalone --nproc_per_node=4", command)


def cut(command: str, text: str) -> str:
    """Return the part of an output that the page shows."""
    text = text[text.index(BEGIN.get(command, "")) :]
    lines: list[str] = []
    inside = False  # the table, which begins after a line of dashes and ends with an empty one
    for line in text.splitlines():
        kept = not inside or not line or line.startswith(ROWS.get(command, line))
        inside = bool(line) and (inside or line.startswith("---"))
        if kept or lines[-1] != "…":
            lines.append(line if kept else "…")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run those that are named, or all."""
    parser = argparse.ArgumentParser(description="Write the samples of docs/command.md anew.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only commands with one of these words")
    asked = parser.parse_args()
    page = PAGE.read_text()
    for sample in reversed([*samples(page)]):
        if not asked.words or set(asked.words) & set(sample.command.split()):
            page = page[: sample.begin] + printed(sample.command) + page[sample.end :]
            print(sample.command, flush=True)
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
