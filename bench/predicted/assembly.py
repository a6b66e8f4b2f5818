"""A kernel's machine code: what NVIDIA's assembler, which Triton ships, makes of the PTX for compute capability 9.0.

Each instruction of the machine knows the line of the PTX that it stands for, because `.loc` names the line to the
assembler. The assembler also writes into each instruction what the scheduler must know: how many clocks a warp waits
before its next instruction, which of six scoreboards hold until a result is there, and for which it waits.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

OPTIONS = ("-lineinfo", "-v", "--fmad=false", "--regAllocOptLevel=2")  # Triton's, and its register count
SCOREBOARDS = 6
# Lines of `nvdisasm -hex`. The second half of an instruction's 128 bits follows on a line of its own.
LINE = re.compile(r'//## File "[^"]*", line (\d+)')
LABEL = re.compile(r"(\.L_x_\d+):")
CODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*?);\s+/\* 0x[0-9a-f]{16} \*/")
CONTROL = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")


@dataclass
class Instruction:
    """An instruction of the machine.

    Attributes:
        opcode, text: its name with modifiers, and all of it.
        line: of the PTX.
        guarded: a predicate says whether it is executed.
        target: where a branch leads, or None.
        stall: clocks until the next instruction of the warp can issue.
        waits: scoreboards that must be free before it issues.
        holds: scoreboards that it holds until it has its result, or has read its operands.
    """

    opcode: str
    text: str
    line: int
    guarded: bool
    target: int | None = None
    stall: int = 0
    waits: tuple[int, ...] = ()
    holds: tuple[int | None, int | None] = (None, None)

    @property
    def name(self) -> str:
        """The opcode without modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def conditional(self) -> bool:
        """Tell whether it is a branch that may not be taken: a predicate guards it, or is its operand."""
        return self.guarded or "P" in self.text.partition(" ")[2].partition("`")[0]


@dataclass(frozen=True)
class Code:
    """The instructions of a kernel, and the registers of a thread."""

    instructions: Sequence[Instruction]
    registers: int


@lru_cache(maxsize=512)
def assembled(ptx: str) -> Code:
    """Return the machine code of the one kernel of a module."""
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(located(ptx))
        target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
        assert target, "PTX names its target"
        said = _run("ptxas", *OPTIONS, f"--gpu-name={target[1]}", str(source), "-o", str(binary)).stderr
        text = _run("nvdisasm", "-g", "-c", "-hex", str(binary)).stdout
    registers = re.search(r"Used (\d+) registers", said)
    assert registers, "the assembler says how many registers it uses"
    return Code(_read(text), int(registers[1]))


def located(ptx: str) -> str:
    """Return a module in which a `.loc` says the line of each instruction, in place of the lines of its source."""
    from ptx.text import parse

    places = {each.line for each in parse(ptx).instructions}
    found = []
    for number, line in enumerate(ptx.split("\n"), 1):
        words = line.split()
        if words[:1] == [".section"]:
            break  # what follows are tables for debuggers
        if number in places:
            found.append(f".loc 1 {number} 0")
        if words[:1] not in ([".loc"], [".file"]):
            found.append(line)
    return "\n".join([*found, '.file 1 "kernel.ptx"', ""])


def _run(tool: str, *words: str) -> Any:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    done = subprocess.run([str(path), *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{tool} failed: {done.stderr}")
    return done


def _read(text: str) -> list[Instruction]:
    """Return the instructions up to the functions that the assembler adds for the corners of divisions."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    line = 0
    for each in re.split(r"\n\$__internal|\n\s*\.type\s+\$__internal", text)[0].split("\n"):
        if match := LINE.search(each):
            line = int(match[1])
        elif match := LABEL.match(each):
            labels[match[1]] = len(found)
        elif match := CODE.search(each):
            found.append(Instruction(match[2], match[2] + match[3], line, match[1] is not None))
        elif found and (match := CONTROL.search(each)):
            _control(found[-1], int(match[1], 16) >> 41)
    for instruction in found:
        if to := re.search(r"`\((\.L_x_\d+)\)", instruction.text):
            instruction.target = labels.get(to[1])
    return found


def _control(instruction: Instruction, bits: int) -> None:
    """Set what the scheduler must know: 4 bits of clocks, one that yields, two scoreboards, and a mask of those."""
    instruction.stall = bits & 15
    written, read, mask = bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63
    instruction.holds = tuple(each if each < SCOREBOARDS else None for each in (written, read))
    instruction.waits = tuple(each for each in range(SCOREBOARDS) if mask >> each & 1)
