"""Print how many instructions kernels without loops have: those of the machine, and those that the model counts.

    python machine_code.py FAMILY…

A line of JSON for each variant of `tests/kernels/variants_FAMILY.py` whose tiles have no masks. A program of its own,
because Triton decides once in a process whether kernels are interpreted.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "kernels")]
LOOPS = ("add_kernel", "reduce_kernel")
LINE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w* )?([A-Z][\w.]*)", re.MULTILINE)
SPECIAL = ("MUFU", "FCHK", "F2I", "I2F.", "FRND", "POPC", "F2F")  # by the special function unit


def machine(binary):
    """Return the names of the machine's instructions, without those that fill up the end."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout
    return [name for name in LINE.findall(text) if name != "NOP"]


def modelled(ptx):
    """Return how many instructions of each pipe the model counts, each line of PTX once."""
    from bench.predicted.model import cost
    from ptx.text import parse
    from ptx.watching.classes import class_of

    slots = Counter()
    for each in parse(ptx).instructions:
        slots.update(cost(".".join((each.opcode, *each.modifiers)).replace(".::", "::"), class_of(each)))
    return slots


if __name__ == "__main__":
    from ahead_of_time import TARGETS, compile_for

    for family in sys.argv[1:]:
        for variant in importlib.import_module(f"variants_{family}").variants():
            name, facts = variant.kernel.__name__, variant.facts
            if facts["masked"] or facts.get("narrow") or name in LOOPS:
                continue
            binary = compile_for(TARGETS["cuda:90"], variant)
            found, slots = machine(binary.asm["cubin"]), modelled(binary.asm["ptx"])
            special = sum(each.startswith(SPECIAL) for each in found)
            counted = {"machine": len(found), "model": sum(slots.values())}
            counted |= {"special": special, "conversion": slots["conversion"], "values": variant.values}
            print(json.dumps({"kernel": name, **facts} | counted), flush=True)
