"""The forms of instructions in our kernels: opcodes with modifiers and how many operands, and who has them.

    PYTHONPATH=.:tests:tests/kernels TRITON_INTERPRET=0 python -m ptx.forms 80 90 100 > tests/ptx/forms.txt

compiles all variants of all kernels as far as PTX and prints a line for each form: the architectures, and the shortest
instruction of that form, its registers named by their width.
"""

import importlib
import re
import sys
from pathlib import Path

from .text import Kernel, Register, parse

LIST = Path(__file__).with_name("forms.txt")
NAMES = {1: "p", 16: "rs", 32: "r", 64: "rd"}


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


def compiled(arch: int):
    """Yield the PTX of every variant of every kernel, and what describes it."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from .driver import _text_for_binary

    ahead_of_time = importlib.import_module("ahead_of_time")
    knobs.runtime.add_stages_inspection_hook = _text_for_binary
    for family in importlib.import_module("variants").FAMILIES:
        for variant in importlib.import_module(f"variants_{family}").variants():
            binary = ahead_of_time.compile_for(GPUTarget("cuda", arch, 32), variant)
            yield binary.asm["ptx"], f"{variant.kernel.__name__} {dict(variant.facts)}"


def lines(texts) -> list[str]:
    """Return the lines of the list, from pairs of an architecture and PTX."""
    found: dict[str, tuple[set[int], str]] = {}
    for arch, text in texts:
        for form, shown in forms_of(parse(text)).items():
            archs, other = found.setdefault(form, (set(), shown))
            archs.add(arch)
            found[form] = (archs, min(shown, other, key=lambda each: (len(each), each)))
    return [f"{' '.join(map(str, sorted(archs)))}\t{shown}" for _, (archs, shown) in sorted(found.items())]


if __name__ == "__main__":
    given = [int(each) for each in sys.argv[1:]]
    print("\n".join(lines((arch, text) for arch in given for text, _ in compiled(arch))))
