"""Forms of instructions are read off kernels; one that is not known is named."""

import pytest

from ptx.faults import Unknown
from ptx.forms import KERNEL, forms_of, lines, parsed
from ptx.instructions import action_of
from ptx.text import parse


def test_a_form_that_is_not_known_is_named_with_its_line():
    instruction, kernel = parsed("add.rn.bf16x4 %r, %r, %r")
    with pytest.raises(Unknown, match=r"line 6 of the PTX, `add\.rn\.bf16x4 %r, %r, %r`: the executor knows no such"):
        action_of(instruction, kernel)


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
