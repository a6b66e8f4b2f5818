"""The forms of instructions in kernels: opcodes with modifiers and how many operands, and who has them.

    texts = [(90, binary.asm["ptx"]) for binary in compiled]
    print("\n".join(lines(texts)))

prints a line for each form: the architectures, and the shortest instruction of that form, its registers named by their
width. `parsed` reads such a line again, so that a list of forms can be tested without compiling a kernel.
"""

import re

from .text import Instruction, Kernel, Register, parse

NAMES = {1: "p", 16: "rs", 32: "r", 64: "rd"}
KERNEL = """.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(.param .u64 param_0)
.reqntid 32
{{
.reg .pred %p; .reg .b16 %rs; .reg .b32 %r; .reg .b64 %rd;
$L__BB0: {line};
}}
"""


def parsed(line: str) -> tuple[Instruction, Kernel]:
    """Return the instruction of a line of PTX, whose registers are %p, %rs, %r and %rd, and a kernel of it alone."""
    kernel = parse(KERNEL.format(line=line))
    return kernel.instructions[0], kernel


def forms_of(kernel: Kernel) -> dict[str, str]:
    """Return an example of each form that a kernel has."""
    return {form_of(each): example(each, kernel) for each in kernel.instructions}


def form_of(instruction) -> str:
    return f"{'.'.join((instruction.opcode, *instruction.modifiers))} of {len(instruction.operands)}"


def example(instruction, kernel: Kernel) -> str:
    """An instruction without its guard, its registers named by their width, its labels and parameters alike."""
    text = re.sub(r"^@!?%[\w$]+ ", "", instruction.text)
    widths = {each.name: each.width for each in _registers(instruction.operands)}
    text = re.sub(r"%[\w$]+", lambda match: f"%{NAMES[widths[match[0]]]}" if match[0] in widths else match[0], text)
    text = text.replace(f"{kernel.name}_param", "param")
    return re.sub(r"(?<=param_)\d+|(?<=\$L__BB)\w+", "0", text)


def _registers(operands):
    for each in operands:
        if isinstance(each, Register):
            yield each
        elif hasattr(each, "__dataclass_fields__"):
            parts = [getattr(each, name) for name in each.__dataclass_fields__]
            yield from _registers([x for part in parts for x in (part if isinstance(part, tuple) else (part,))])


def lines(texts) -> list[str]:
    """Return the lines of the list, from pairs of an architecture and PTX."""
    found: dict[str, tuple[set[int], str]] = {}
    for arch, text in texts:
        for form, shown in forms_of(parse(text)).items():
            archs, other = found.setdefault(form, (set(), shown))
            archs.add(arch)
            found[form] = (archs, min(shown, other, key=lambda each: (len(each), each)))
    return [f"{' '.join(map(str, sorted(archs)))}\t{shown}" for _, (archs, shown) in sorted(found.items())]
