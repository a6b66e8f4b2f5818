"""Moves copy bits, constants and special registers are read, and what is unknown is named."""

import pytest

from ptx.faults import Unknown
from ptx.tests.corners.harness import result, run


@pytest.mark.parametrize(
    "kind, word", [("b16", "b16"), ("u16", "b16"), ("u32", "b32"), ("b64", "b64"), ("u64", "b64"), ("f32", "b32")]
)
def test_bits_are_moved_as_they_are(kind, word):
    nan = {"b16": 0x7F81, "b32": 0x7F800001, "b64": 0x7FF0000000000001}[word]
    assert result(f"mov.{kind} %d, %a", word, a=(word, [nan, 0, 1])) == [nan, 0, 1]


def test_parts_and_wholes():
    registers = {"d": ("b64", None), "a": ("b32", [0x11112222, 0xFFFFFFFF]), "b": ("b32", [0x33334444, 0])}
    frame = run("mov.b64 %d, {%a, %b};\nmov.b64 {_, %a}, %d;", 2, registers)
    assert frame.registers["%d"].tolist() == [0x3333444411112222, 0xFFFFFFFF]
    assert frame.registers["%a"].tolist() == [0x33334444, 0]
    registers = {"d": ("b32", [0x80017FFF]), "a": ("b16", None), "b": ("b16", None), "c": ("b32", None)}
    frame = run("mov.b32 {%a, %b}, %d;\nmov.b32 %c, {%b, %a};", 1, registers)
    assert [frame.registers[f"%{name}"][0] for name in "abc"] == [0x7FFF, 0x8001, 0x7FFF8001]


def test_a_move_is_a_copy():
    """A later write to one of two registers, by some threads, leaves the other."""
    registers = {"a": ("b32", [1, 2]), "b": ("b32", None), "p": ("pred", [True, False])}
    frame = run("mov.u32 %b, %a;\n@%p mov.u32 %b, 9;", 2, registers)
    assert (frame.registers["%a"].tolist(), frame.registers["%b"].tolist()) == ([1, 2], [9, 2])


@pytest.mark.parametrize(
    "constant, bits",
    [
        ("5", 5),
        ("-1", 0xFFFFFFFF),
        ("0x1F", 0x1F),
        ("0b101", 5),
        ("017", 15),
        ("4294967295U", 0xFFFFFFFF),
        ("0fBF800000", 0xBF800000),
    ],
)
def test_constants(constant, bits):
    assert result(f"mov.b32 %d, {constant}", "b32", a=("b32", [0])) == [bits]


def test_special_registers():
    lines = (
        "mov.u32 %a, %tid.x;\nmov.u32 %b, %ctaid.x;\nmov.u32 %c, %ntid.x;\nmov.u32 %d, %nctaid.x;\nmov.u32 %e, %laneid;"
    )
    frame = run(lines, 64, dict.fromkeys("abcde", ("b32", None)), programs=2)
    a, b, c, d, e = (frame.registers[f"%{name}"].tolist() for name in "abcde")
    assert (
        a == [*range(64)] * 2
        and b == [0] * 64 + [1] * 64
        and set(c) == {64}
        and set(d) == {2}
        and e == [*range(32)] * 4
    )


def test_a_register_that_nobody_wrote_is_poison():
    assert result("mov.b32 %d, %b", "b32", a=("b32", [0]), b=("b32", [0])) == [0]
    frame = run("mov.b32 %d, %b;", 1, {"d": ("b32", None), "b": ("b32", None)})
    assert frame.registers["%d"].tolist() == [0xA5A5A5A5]


@pytest.mark.parametrize(
    "line, word",
    [
        ("mov.b64 %w, %d", "64-bit value in the 32-bit register %d"),
        ("ld.local.b32 %d, [%w]", "local"),
        ("mov.u32 %d, %clock", "%clock"),
        ("ld.global.L3::x.b32 %d, [%w]", "L3"),
        ("mov.b32 %d, elsewhere", "elsewhere"),
        ("frobnicate.b32 %d, %d", "instruction"),
    ],
)
def test_what_is_unknown_is_named(line, word):
    with pytest.raises(Unknown, match=rf"line 8 of the PTX, .*{word}"):
        run(f"{line};", 1, {"d": ("b32", [0]), "w": ("b64", [0])})
