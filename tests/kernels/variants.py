"""What a kernel is compiled as ahead of time, and what its code was found to do.

A family of kernels lists what it is compiled as in a file `variants_FAMILY.py` beside this one, whose `variants()`
yields a `Variant` for each; its tests read the code's facts from `compiled(family, target)`.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HERE = pathlib.Path(__file__).parent
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


@dataclass(frozen=True)
class Variant:
    """A kernel as its launcher would compile it.

    Attributes:
        kernel: the `@triton.jit` function.
        signature: the type of each argument that is not constant, as Triton writes it: "*fp32", "i32", "i64".
        constants: the value of each that is: constexprs, and None for a pointer that is absent.
        aligned: the arguments that are multiples of sixteen: a pointer in bytes, a number in ones.
        options: what the launch says beside its arguments: num_warps, enable_fp_fusion.
        values: how many values a program streams, of all its threads.
        facts: what tells it from the kernel's other variants, in words and numbers that JSON can hold.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any] = field(default_factory=dict)
    aligned: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    values: int = 1
    facts: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def compiled(family: str, target: str) -> tuple[dict[str, Any], ...]:
    """Return what `ahead_of_time.py` prints of the variants of a family: facts of each, by name.

    target, kernel, the variant's own facts, and
        values: of a thread.
        accesses: how often each instruction on global memory stands in the code, by its name.
        spilled: bytes of stack and local memory; all are 0 where nothing spilled.
        moved (cuda): bytes {"ld", "st"} that the code reads and writes for each value, a loop's body counted once.
        fused (cuda): multiplications fused with an addition.
        flushing (cuda): instructions that take subnormals for zero.
        registers (cuda): of a thread.
        shared (cuda): bytes of a program.
    """
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "ahead_of_time.py"), family, target]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(line) for line in done.stdout.splitlines())


def name_of(facts: Mapping[str, Any]) -> str:
    """A variant in words, for the message of an assertion."""
    found = ("values", "accesses", "spilled", "moved", "fused", "flushing", "registers", "shared")
    return " ".join(f"{key}={value}" for key, value in facts.items() if key not in found)
