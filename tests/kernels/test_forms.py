"""The executor of PTX knows every form of instruction that our kernels have, and the list of them is right."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ptx.flow import JUMPS
from ptx.forms import forms_of, parsed
from ptx.instructions import action_of
from ptx.watching.classes import CLASSES, class_of

pytest.importorskip("triton")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIST = (HERE / "forms.txt").read_text().splitlines()


def described(line):
    """The architectures and the form of a line: constants and offsets differ from one version of Triton to another."""
    archs, shown = line.split("\t")
    return archs, *forms_of(parsed(shown)[1])


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_form_is_known(arch):
    shown = [form for archs, form in (line.split("\t") for line in LIST) if str(arch) in archs.split()]
    assert len(shown) > 150
    for line in shown:
        instruction, kernel = parsed(line)
        if instruction.opcode not in JUMPS:
            action_of(instruction, kernel)


def test_every_form_has_a_class():
    assert {class_of(parsed(line.split("\t")[1])[0]) for line in LIST} == {*CLASSES} - {"matrix"}


def test_no_form_is_an_approximation():
    """The executor rounds them as a GPU need not, and bytes are compared."""
    assert not [line for line in LIST if {"approx", "full"} & {*parsed(line.split("\t")[1])[0].modifiers}]


@pytest.mark.slow  # compiles every variant of every kernel
@pytest.mark.timeout(1800)
def test_the_list_is_that_of_all_kernels():
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(ROOT / ".ptx_cache"),
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, str(HERE / "forms_of_kernels.py"), "80", "90", "100"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [*map(described, done.stdout.splitlines())] == [*map(described, LIST)]
