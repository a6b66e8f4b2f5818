"""Compile every kernel with the Triton that is there, and say what its code takes of a multiprocessor.

    python scripts/gpu_kernels.py FACTS [TARGET [FAMILY]]

TARGET is one of `tests/kernels/ahead_of_time.py`, and the GPU that is here if none is named; FAMILY is one of kernels,
all if none is named. Writes JSON to FACTS, prints a line for each kernel, those last that leave a multiprocessor
emptiest, and ends with 1 and a list if some do not compile.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).resolve().parents[1] / "tests" / "kernels"
sys.path.append(str(KERNELS))
from variants import name_of, printed_by  # noqa: E402 there it lies

FAMILIES = sorted(path.stem.removeprefix("variants_") for path in KERNELS.glob("variants_*.py"))
# Each is told the target, too. The last binds what the launchers launch.
PROGRAMS = (*(("ahead_of_time.py", family) for family in FAMILIES), ("launches.py",))
Facts = Mapping[str, Any]

# Of a multiprocessor of NVIDIA GPUs: registers and warps of each of its quarters, programs, and bytes of shared memory
# by compute capability, of which each program takes 1024 more than it asks for.
REGISTERS, WARPS, RESIDENT = 16384, 16, 32
SHARED = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}


def main(words: Sequence[str], programs: Sequence[Sequence[str]] = PROGRAMS) -> int:
    target = words[1] if len(words) > 1 else here()
    programs = [each for each in programs if not words[2:] or each[1:] == (words[2],)]
    with ThreadPoolExecutor(len(programs)) as threads:  # a process each, side by side
        facts = [
            each for found in threads.map(facts_of, [(*program, target) for program in programs]) for each in found
        ]
    failed = [each for each in facts if "error" in each]
    rows = [each | {"occupancy": occupancy(each)} for each in facts if "registers" in each]
    Path(words[0]).write_text(json.dumps({"target": target, "compiled": rows, "failed": errors(failed)}, indent=1))
    for each in sorted(rows, key=lambda row: -row["occupancy"]):
        numbers = f"{each['registers']:>4} registers, {each['warps']} warps, {each['shared']:>6} bytes shared"
        print(f"{numbers}, {100 * each['occupancy']:>4.0f}% occupied, {sum(each['spilled'])} spilled: {name_of(each)}")
    print(f"{target}: {len(rows)} compiled, {len(failed)} failed")
    for name, error in errors(failed).items():
        print(f"  failed: {name}: {error}")
    return int(bool(failed))


def here() -> str:
    """The target of the GPU that is here: the greatest known of no higher capability, or else the least."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"cuda:{max((known for known in SHARED if known <= 10 * major + minor), default=min(SHARED))}"


def facts_of(program: Sequence[str]) -> Sequence[Facts]:
    """The lines that a program prints; if it ended without any that says why, that too is one."""
    try:
        return printed_by(*program)
    except AssertionError as error:
        return [{"program": " ".join(program), "error": str(error)}]


def occupancy(facts: Facts) -> float:
    """The share of a multiprocessor's warps that programs of this code can fill."""
    warps, capability = facts["warps"], int(facts["target"].partition(":")[2])
    registers = -(-max(facts["registers"], 1) // 8) * 8 * 32  # of a warp: eight at a time for each thread
    by_registers = 4 * min(REGISTERS // registers, WARPS) // warps
    by_shared = SHARED[capability] // (facts["shared"] + 1024)
    return min(by_registers, by_shared, RESIDENT) * warps / (4 * WARPS)


def errors(failed: Sequence[Facts]) -> dict[str, str]:
    """Return the most telling line of each error, by the name of the kernel's variant."""
    return {name_of(each): said_by(each["error"]) for each in failed}


def said_by(error: str) -> str:
    """The kind of an error and its last line with words in it: Triton says what is wrong after it has shown where."""
    lines = [line.strip() for line in error.splitlines() if any(letter.isalpha() for letter in line)]
    kind = lines[0].partition(":")[0]
    return lines[0] if len(lines) == 1 else f"{kind}: {lines[-1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
