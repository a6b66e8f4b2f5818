"""Variants that a kernel is compiled as ahead of time, and the facts found in their code.

A family of kernels lists what it is compiled as in a file `variants_FAMILY.py` beside this one, whose `variants()`
yields a `Variant` for each; its tests read the code's facts from `compiled(family, target)`.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

HERE = pathlib.Path(__file__).parent
FAMILIES = tuple(sorted(path.stem.removeprefix("variants_") for path in HERE.glob("variants_*.py")))
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


Key = tuple[str, tuple[str, ...], int, bool]


def key_of(variant: Variant) -> Key:
    """Return all that Triton compiles a variant by, in words: two with one key are the same code."""
    return _key(variant.kernel, variant.signature, variant.constants, variant.aligned, variant.options)


def key_of_launch(launched: Any) -> Key:
    """Return the same of a `Launched` of the executor of PTX."""
    source, names = launched.source, launched.source.fn.arg_names
    signature = {name: kind for name, kind in source.signature.items() if kind != "constexpr"}
    constants = {names[place[0]]: value for place, value in source.constants.items()}
    aligned = [names[place[0]] for place, facts in source.attrs.items() if ["tt.divisibility", 16] in facts]
    options = {name: getattr(launched.metadata, name) for name in DEFAULTS}
    return _key(source.fn, signature, constants, aligned, options)


DEFAULTS = {"num_warps": 4, "enable_fp_fusion": True, "maxnreg": None}


def _key(
    kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], aligned: Iterable[str], options: Any
) -> Key:
    arguments = [
        f"{name}: {signature[name]}{', aligned' * (name in aligned)}"
        if name in signature
        else f"{name} = {_word(constants[name])}"
        for name in kernel.arg_names
    ]
    return kernel.__name__, tuple(arguments), *(DEFAULTS | dict(options)).values()


def _word(constant: Any) -> str:
    """A constant in words: a function of Triton's by its name."""
    constant = getattr(constant, "value", constant)
    return getattr(constant, "__name__", str(constant))


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
        warps (cuda): of a program.

    Raises:
        AssertionError: some do not compile; it lists them.
    """
    return without_errors(printed_by("ahead_of_time.py", family, target))


def printed_by(program: str, *arguments: str) -> tuple[dict[str, Any], ...]:
    """Return the lines of JSON that a program beside this file prints, run where kernels are not interpreted."""
    path = os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, str(HERE / program), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = tuple(json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0 or any("error" in line for line in lines), done.stderr
    return lines


def without_errors(facts: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Return facts; raise an AssertionError that lists those with an error, if there are any."""
    failed = [f"{name_of(each)}: {each['error']}" for each in facts if "error" in each]
    assert not failed, "\n".join([f"{len(failed)} of {len(facts)} failed:", *failed])
    return facts


def why(error: BaseException) -> str:
    """The kind of an error and, behind all that it says, the first cause: Triton raises one error from another."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    causes = [] if first is error else [f"{type(first).__name__}: {first}"]
    return "\n".join([f"{type(error).__name__}: {error}", *causes])


def name_of(facts: Mapping[str, Any]) -> str:
    """A variant in words, for the message of an assertion."""
    found = ("error", "values", "accesses", "spilled", "moved", "fused", "flushing", "registers", "shared", "warps")
    found += ("occupancy",)  # scripts/gpu_kernels.py adds it
    return " ".join(f"{key}={value}" for key, value in facts.items() if key not in found)
