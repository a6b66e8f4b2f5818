"""Comparisons are ordered or not where one is NaN, zeros are equal, and integers have signs or not."""

import itertools
import operator

import pytest

from ptx.faults import Unknown

from . import exact
from .harness import result, run

OPERATORS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
WORD = {16: "b16", 32: "b32", 64: "b64"}
INFINITE = 1 << 20000


def number(bits, kind):
    """Return a number that orders bits of a float: a fraction, or an integer beyond all of them."""
    if exact.is_infinite(bits, kind):
        return -INFINITE if exact.negative(bits, kind) else INFINITE
    return exact.decode(bits, kind)


def compared(name, a, b, kind):
    broken = exact.is_nan(a, kind) or exact.is_nan(b, kind)
    if name in ("num", "nan"):
        return broken == (name == "nan")
    if broken:
        return len(name) == 3
    return OPERATORS[name[:2]](number(a, kind), number(b, kind))


NAMES = [*OPERATORS, *(f"{name}u" for name in OPERATORS), "num", "nan"]


@pytest.mark.parametrize("kind", exact.FORMATS)
def test_floats(kind):
    values = [*exact.corners(kind)[::3], 0, 1 << (exact.width(kind) - 1), *exact.nans(kind)[:2]]
    a, b = zip(*itertools.product(values, repeat=2), strict=True)
    word = WORD[exact.width(kind)]
    for name in NAMES:
        got = result(f"setp.{name}.{kind} %d, %a, %b", "pred", a=(word, a), b=(word, b))
        assert got == [compared(name, x, y, kind) for x, y in zip(a, b, strict=True)], name


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_of_packed_halves_each_has_a_predicate(kind):
    values = exact.corners(kind)[::4] + exact.nans(kind)[:1]
    rows = list(itertools.product(values, repeat=2))
    flipped = rows[::-1]
    a, b = ([x[k] | y[k] << 16 for x, y in zip(rows, flipped, strict=True)] for k in (0, 1))
    for name in ("eq", "lt", "num", "neu"):
        frame = run(
            f"setp.{name}.{kind}x2 %p|%q, %a, %b;",
            len(a),
            {"p": ("pred", None), "q": ("pred", None), "a": ("b32", a), "b": ("b32", b)},
        )
        assert frame.registers["%p"].tolist() == [compared(name, *row, kind) for row in rows]
        assert frame.registers["%q"].tolist() == [compared(name, *row, kind) for row in flipped]


@pytest.mark.parametrize("width", [16, 32, 64])
def test_integers(width):
    top = 1 << (width - 1)
    values = [0, 1, top - 1, top, top + 1, 2 * top - 1]
    a, b = zip(*itertools.product(values, repeat=2), strict=True)
    word = WORD[width]

    def check(line, rule):
        got = result(f"setp.{line} %d, %a, %b", "pred", a=(word, a), b=(word, b))
        assert got == [rule(x, y) for x, y in zip(a, b, strict=True)], line

    for name, rule in OPERATORS.items():
        check(f"{name}.u{width}", rule)
        check(f"{name}.s{width}", lambda x, y, rule=rule: rule(x - (x & top) * 2, y - (y & top) * 2))
    for name, other in UNSIGNED.items():
        check(f"{name}.u{width}", OPERATORS[other])
    for name in ("eq", "ne"):
        check(f"{name}.b{width}", OPERATORS[name])


def test_a_subnormal_equals_zero_only_where_it_is_flushed():
    sources = {"a": ("b32", [1, 0x807FFFFF, 0x00800000]), "b": ("b32", [0, 0, 0])}
    assert result("setp.eq.f32 %d, %a, %b", "pred", **sources) == [False, False, False]
    assert result("setp.eq.ftz.f32 %d, %a, %b", "pred", **sources) == [True, True, False]


@pytest.mark.parametrize("name, rule", [("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)])
def test_what_holds_and_what_does_not_are_combined_with_a_third(name, rule):
    rows = list(itertools.product((0, 1), (0, 1), (False, True)))
    a, b, c = zip(*rows, strict=True)
    registers = {"p": ("pred", None), "q": ("pred", None), "a": ("b32", a), "b": ("b32", b), "c": ("pred", c)}
    frame = run(f"setp.eq.{name}.s32 %p|%q, %a, %b, %c;", len(a), registers)
    assert frame.registers["%p"].tolist() == [rule(x == y, z) for x, y, z in rows]
    assert frame.registers["%q"].tolist() == [rule(x != y, z) for x, y, z in rows]
    frame = run(f"setp.eq.{name}.s32 %p, %a, %b, !%c;", len(a), registers)
    assert frame.registers["%p"].tolist() == [rule(x == y, not z) for x, y, z in rows]


@pytest.mark.parametrize("kind, word", [("b16", "b16"), ("f32", "b32"), ("b64", "b64"), ("f64", "b64"), ("s32", "b32")])
def test_selection_moves_bits(kind, word):
    nan = {"b16": 0x7F81, "b32": 0x7F800001, "b64": 0x7FF0000000000001}[word]
    sources = {"a": (word, [nan, nan, 1]), "b": (word, [2, 3, nan]), "c": ("pred", [True, False, False])}
    assert result(f"selp.{kind} %d, %a, %b, %c", word, **sources) == [nan, 3, nan]


@pytest.mark.parametrize("line", ["lt.b32", "equ.s32", "lo.f32", "hi.s32", "eq.ftz.s32", "zz.u32"])
def test_comparisons_that_a_type_has_not_are_refused(line):
    with pytest.raises(Unknown, match=f"line 8 of the PTX, `setp.{line}"):
        result(f"setp.{line} %d, %a, %a", "pred", a=("b32", [0]))
