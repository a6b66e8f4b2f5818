"""The time that an H200 takes for what a launch was counted to do, and the part of it that is busy the longest.

A launch takes as long as the slowest of these, if enough warps hide each other's waiting:

    memory      distinct sectors, at the speed of a large copy
    cache       requested sectors, and turns of shared memory, at 128 bytes a clock and multiprocessor
    issue       instructions, at one a clock and scheduler
    integer …   instructions of a pipe, at the results a clock and multiprocessor that the CUDA C++ Programming Guide's
                table "Throughput of Native Arithmetic Instructions" gives for compute capability 9.0

PTX is not what a GPU executes: an instruction of PTX takes none, one or several of the machine. `cost` says how many,
in which pipe, as the assembler's code for sm_90 shows. Not in the model: the time to launch, latency that too few warps
hide, and instructions that the assembler combines or that move registers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

COPY = 4.3e12  # bytes a second that a large copy reads and writes
CLOCK = 1.98e9  # a second, boosted
MULTIPROCESSORS, SCHEDULERS, WARP, SECTOR, LINE = 132, 4, 32, 32, 128

# Results a clock and multiprocessor.
RATES = {
    "float": 128,  # fp32 and halves, by lanes: a pair of halves is one
    "integer": 64,  # additions, comparisons, selections, shifts and logic; also maxima of fp32, and integers to fp32
    "multiply": 64,  # of integers
    "fp64": 64,
    "conversion": 16,  # the special function unit: other conversions, rounding to integers, reciprocals, counts of bits
    "exchange": 32,  # loads, stores and shuffles
}
# Whose parts are executed elsewhere than most of its class.
Cost = Mapping[str, float]
FREE: Cost = {}
DIVISION_F32: Cost = {"conversion": 2, "float": 6, "issue": 3}  # reciprocal, check, Newton's steps; a jump for corners
ROOT_F32: Cost = {"conversion": 1, "float": 6, "integer": 1, "issue": 2}
DIVISION_F64: Cost = {"conversion": 1, "fp64": 8, "integer": 2, "issue": 3}
DIVISION_INTEGER: Cost = {"conversion": 3, "integer": 12, "multiply": 3}
INTEGERS = {f"{letter}{width}" for letter in "us" for width in (8, 16, 32, 64)}


class Limit(NamedTuple):
    """A part of the GPU, and the seconds that a launch keeps it busy."""

    name: str
    seconds: float


def cost(name: str, kind: str) -> Cost:
    """Return how many instructions of which pipe an instruction of PTX of a class takes; "issue" is none of a pipe."""
    opcode, *modifiers = name.split(".")
    if kind in ("move", "control"):
        return FREE if kind == "move" else {"issue": 1}
    if kind in ("memory", "shared"):
        return {"exchange": 1}
    if kind == "warp":
        return {"integer": 1} if opcode == "vote" else {"exchange": 2 if opcode == "redux" else 1}
    if kind == "conversion":
        return _conversion(modifiers)
    if kind == "special" or opcode == "div":
        return _division(opcode, modifiers)
    wide = 2 if modifiers[-1] in ("b64", "s64", "u64") else 1
    if kind == "integer":
        return _integer(opcode, modifiers, wide)
    if opcode in ("min", "max", "setp", "selp"):
        return {"integer": 2 if kind == "fp64" and opcode == "selp" else 1} if kind == "float" else {"fp64": 1}
    if opcode in ("abs", "neg") and kind == "float" and "x2" not in modifiers[-1]:
        return FREE  # a modifier of what reads the result
    return {kind: 2 if modifiers[-1] == "f32x2" else 1}


def _division(opcode: str, modifiers: Sequence[str]) -> Cost:
    if modifiers[-1] == "f64":
        return DIVISION_F64
    if modifiers[-1] == "f32":
        return DIVISION_F32 if opcode == "div" else ROOT_F32
    return DIVISION_INTEGER


def _integer(opcode: str, modifiers: Sequence[str], wide: int) -> Cost:
    if "pred" in modifiers:
        return FREE  # combined with the comparison before it
    if opcode in ("mul", "mad"):
        long = 2 if opcode == "mad" and "wide" in modifiers else 3 * wide - 2
        return {"multiply": long if "wide" not in modifiers else 1}
    if opcode == "popc":
        return {"conversion": wide}
    if opcode in ("min", "max") and wide == 2:
        return {"integer": 4}
    return {"integer": wide}


def _conversion(modifiers: Sequence[str]) -> Cost:
    to, source = modifiers[-2], modifiers[-1]
    if to in INTEGERS and source in INTEGERS:
        return {"integer": 1} if int(to[1:]) > int(source[1:]) else FREE  # lower bits are there already
    if "f64" in (to, source):
        return {"conversion": 1}
    if source in ("s32", "u32") or (to[0] in "bf" and "16" in to):
        return {"integer": 1}  # I2FP, and F2FP, which rounds to a half
    if source in ("bf16", "f16"):
        return {"integer" if source == "bf16" else "float": 1}
    return {"conversion": 1}


def limits(counted: Any) -> list[Limit]:
    """Return how long a launch keeps each part of the GPU busy, the longest first."""
    slots: Counter[str] = Counter()
    for name, (_, warps) in counted.instructions.items():
        for pipe, count in cost(name, counted.classes[name]).items():
            slots[pipe] += count * warps
    clocks = {pipe: slots[pipe] * WARP / rate for pipe, rate in RATES.items()}
    clocks["issue"] = sum(slots.values()) / SCHEDULERS
    clocks["cache"] = sum(counted.requested.values()) * SECTOR / LINE + counted.wavefronts
    found = [Limit(name, count / MULTIPROCESSORS / CLOCK) for name, count in clocks.items()]
    found.append(Limit("memory", sum(counted.distinct.values()) * SECTOR / COPY))
    return sorted(found, key=lambda each: -each.seconds)


def instructions_a_byte() -> float:
    """Return how many instructions of single lanes the GPU issues while its memory moves a byte."""
    return MULTIPROCESSORS * SCHEDULERS * WARP * CLOCK / COPY


def predict(counted: Sequence[Any], n: int, floor: float, moves: float) -> dict[str, Any]:
    """Return what launches take together.

    Args:
        floor, moves: bytes that must be moved, and those that the algorithm moves.

    Returns:
        bytes, floor: of a value.
        distinct, requested: sectors relative to those that `moves` bytes fill.
        instructions: of single lanes, for a byte of `moves`.
        bound: the part that is busy the longest, and `busy`, how long each part is, relative to a copy of `moves`.
        share: of the bytes a second of a copy.
        classes: instructions of lanes for each value, by class.
    """
    ideal, busy = moves / COPY, Counter[str]()
    seconds, bound = 0.0, Counter[str]()
    classes: Counter[str] = Counter()
    for launch in counted:
        found = limits(launch)
        seconds += found[0].seconds
        bound[found[0].name] += found[0].seconds
        busy.update({each.name: each.seconds for each in found})
        classes.update({name: WARP * warps for name, (_, warps) in launch.by_class().items()})
    slots = busy["issue"] * MULTIPROCESSORS * SCHEDULERS * CLOCK * WARP
    return {
        "bytes": moves / n,
        "floor": floor / n,
        "distinct": sum(sum(each.distinct.values()) for each in counted) * SECTOR / moves,
        "requested": sum(sum(each.requested.values()) for each in counted) * SECTOR / moves,
        "instructions": slots / moves,
        "bound": max(bound, key=lambda name: bound[name]),
        "busy": {name: round(part / ideal, 3) for name, part in busy.most_common()},
        "share": min(1.0, ideal / seconds),
        "classes": {name: round(count / n, 2) for name, count in classes.most_common()},
    }
