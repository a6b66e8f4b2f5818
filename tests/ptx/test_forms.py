"""The executor knows every form of instruction that our kernels have, and the list of them is right."""

import os
import subprocess
import sys

import pytest

from .faults import Unknown
from .flow import JUMPS
from .forms import LIST, forms_of, lines
from .instructions import action_of
from .text import parse

pytest.importorskip("triton")
TESTS = LIST.parents[1]
FORMS = [line.split("\t") for line in LIST.read_text().splitlines()]
KERNEL = """.extern .shared .align 16 .b8 global_smem[];
.visible .entry k(.param .u64 param_0)
.reqntid 32
{{
.reg .pred %p; .reg .b16 %rs; .reg .b32 %r; .reg .b64 %rd;
$L__BB0: {line};
}}
"""


def described(line):
    """The architectures and the form of a line: constants and offsets differ from one version of Triton to another."""
    archs, shown = line.split("\t")
    return archs, *forms_of(parse(KERNEL.format(line=shown)))


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_form_is_known(arch):
    shown = [line for archs, line in FORMS if str(arch) in archs.split()]
    assert len(shown) > 150
    for line in shown:
        kernel = parse(KERNEL.format(line=line))
        (instruction,) = kernel.instructions
        if instruction.opcode not in JUMPS:
            action_of(instruction, kernel)


def test_a_form_that_is_not_known_is_named_with_its_line():
    kernel = parse(KERNEL.format(line="add.rn.bf16x4 %r, %r, %r"))
    with pytest.raises(Unknown, match=r"line 6 of the PTX, `add\.rn\.bf16x4 %r, %r, %r`: the executor knows no such"):
        action_of(kernel.instructions[0], kernel)


def test_the_list_is_made_of_what_is_in_a_kernel():
    text = KERNEL.format(
        line="@!%p add.s32 %r, %r, 17;\nld.global.v2.b32 {%r, %r}, [%rd + 8];\nsub.s32 %r, %r, %r;\nret"
    )
    assert [*forms_of(parse(text))] == ["add.s32 of 3", "ld.global.v2.b32 of 2", "sub.s32 of 3", "ret of 0"]
    other = text.replace("sub.s32 %r, %r, %r", "sub.s16 %rs, %rs, %rs")
    assert lines([(90, text), (80, other)]) == [
        "80 90\tadd.s32 %r, %r, 17", "80 90\tld.global.v2.b32 {%r, %r}, [%rd + 8]", "80 90\tret",
        "80\tsub.s16 %rs, %rs, %rs", "90\tsub.s32 %r, %r, %r",
    ]  # fmt: skip


@pytest.mark.slow  # compiles every variant of every kernel
@pytest.mark.timeout(1800)
def test_the_list_is_that_of_all_kernels():
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(TESTS.parent / ".ptx_cache"),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "kernels")]),
    }
    command = [sys.executable, "-m", "ptx.forms", "80", "90", "100"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [*map(described, done.stdout.splitlines())] == [*map(described, LIST.read_text().splitlines())]
