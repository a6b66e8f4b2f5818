"""Integers wrap, extend, saturate and divide as the manual says; expected values are Python's integers, cut to bits."""

import itertools
import random

import pytest

from ptx.faults import Unknown

from .harness import result, table

WORD = {16: "b16", 32: "b32", 64: "b64"}


def values(width):
    """The ends of both kinds of integers, powers of two and their neighbours, and some drawn."""
    top = 1 << (width - 1)
    source = random.Random(width)
    few = [0, 1, 2, 3, 7, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, 1 << (width // 2), (1 << (width // 2)) - 1]
    return few + [source.getrandbits(width) for _ in range(6)]


def signed(x, width):
    return x - (1 << width) if x >> (width - 1) else x


def read(x, kind):
    width = int(kind[1:])
    return signed(x, width) if kind[0] == "s" else x


def quotient(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


KINDS = [f"{sign}{width}" for width in (16, 32, 64) for sign in "us"]
RULES = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul.lo": lambda a, b: a * b,
    "min": min,
    "max": max,
    "div": quotient,
    "rem": lambda a, b: a - quotient(a, b) * b,
}


def check(name, kind, rule, d, rows):
    """Run `name.kind` on rows of raw sources and compare with a rule of what they mean."""
    opcode, _, modifier = name.partition(".")
    word = WORD[int(kind[1:])]
    expected = [rule(*(read(x, kind) for x in row)) for row in rows]
    operands = ", ".join(f"%{letter}" for letter in "abc"[: len(rows[0])])
    line = f"{opcode}.{modifier + '.' if modifier else ''}{kind} %d, {operands}"
    got, wanted = table(line, d, word, [(*row, value) for row, value in zip(rows, expected, strict=True)])
    assert got == wanted, line


@pytest.mark.parametrize("kind", KINDS)
def test_two_sources(kind):
    width = int(kind[1:])
    for name, rule in RULES.items():
        rows = list(itertools.product(values(width), repeat=2))
        if name in ("div", "rem"):
            rows = [(a, b) for a, b in rows if b]
        check(name, kind, rule, WORD[width], rows)


@pytest.mark.parametrize("kind", KINDS)
def test_products_have_twice_the_bits(kind):
    width = int(kind[1:])
    rows = list(itertools.product(values(width), repeat=2))
    check("mul.hi", kind, lambda a, b: a * b >> width, WORD[width], rows)
    if width < 64:
        check("mul.wide", kind, lambda a, b: a * b, WORD[2 * width], rows)


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_added_to(kind):
    width = int(kind[1:])
    rows = list(itertools.product(values(width)[::2], repeat=3))
    check("mad.lo", kind, lambda a, b, c: a * b + c, WORD[width], rows)
    check("mad.hi", kind, lambda a, b, c: (a * b >> width) + c, WORD[width], rows)


def test_two_products_of_halves_and_bytes_are_added_to():
    rows = list(itertools.product(values(32)[::2], repeat=3))
    for name, first in (("lo", 0), ("hi", 2)):
        check(
            f"dp2a.{name}.u32",
            "u32",
            lambda a, b, c, first=first: (
                c + sum((a >> 16 * k & 0xFFFF) * (b >> 8 * (first + k) & 0xFF) for k in range(2))
            ),
            "b32",
            rows,
        )
    with pytest.raises(Unknown):
        result("dp2a.lo.s32.u32 %d, %a, %a, %a", "b32", a=("b32", [1]))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_a_wide_product_carries_into_all_its_bits(kind):
    width = int(kind[1:])
    rows = list(itertools.product(values(width)[::3], values(width)[::3], values(2 * width)[::3]))
    word, wide = WORD[width], WORD[2 * width]
    rows = [(a, b, c, read(a, kind) * read(b, kind) + c) for a, b, c in rows]
    got, expected = table(f"mad.wide.{kind} %d, %a, %b, %c", wide, [word, word, wide], rows)
    assert got == expected


def test_carries_cross_the_middle_of_64_bits():
    low = (1 << 32) - 1
    rows = [
        (low, 1, 1 << 32),
        ((1 << 64) - 1, 1, 0),
        (1 << 63, 1 << 63, 0),
        (low << 32 | low, low, low - 1 | low << 32 & 0),
    ]
    got, expected = table("add.s64 %d, %a, %b", "b64", "b64", rows[:3])
    assert got == expected
    got, expected = table("sub.u64 %d, %a, %b", "b64", "b64", [(0, 1, (1 << 64) - 1), (1 << 32, 1, low)])
    assert got == expected
    got, expected = table("mul.hi.u64 %d, %a, %b", "b64", "b64", [((1 << 64) - 1, (1 << 64) - 1, (1 << 64) - 2)])
    assert got == expected


def test_division_by_zero_sets_all_bits():
    """The manual says nothing of it; a GPU does this."""
    for kind in ("u32", "s32"):
        got, expected = table(f"div.{kind} %d, %a, %b", "b32", "b32", [(5, 0, -1), (0, 0, -1)])
        assert got == expected


def test_sums_saturate_where_they_are_asked_to():
    top = (1 << 31) - 1
    got, expected = table("add.sat.s32 %d, %a, %b", "b32", "b32", [(top, 1, top), (-top - 1, -1, -top - 1), (1, 2, 3)])
    assert got == expected
    got, expected = table(
        "sub.sat.s32 %d, %a, %b", "b32", "b32", [(top, -1, top), (0, -top - 1, top), (-2, top, -top - 1)]
    )
    assert got == expected


@pytest.mark.parametrize("width", [16, 32, 64])
def test_one_source(width):
    word, rows = WORD[width], [(x, signed(x, width)) for x in values(width)]
    got, expected = table(f"neg.s{width} %d, %a", word, word, [(x, -value) for x, value in rows])
    assert got == expected
    got, expected = table(f"abs.s{width} %d, %a", word, word, [(x, abs(value)) for x, value in rows])
    assert got == expected  # of the least, itself


def test_pairs_do_not_carry_into_each_other():
    rows = [(0x0000FFFF, 0x00000001, 0), (0xFFFF0001, 0x00010001, 2), (0x7FFF8000, 0x00018000, 0x80000000)]
    for kind in ("u16x2", "s16x2"):
        got, expected = table(f"add.{kind} %d, %a, %b", "b32", "b32", rows)
        assert got == expected
    rows = [(0xFFFF0001, 0x00018000, 0xFFFF8000, 0x00010001), (0x80007FFF, 0x7FFF8000, 0x80008000, 0x7FFF7FFF)]
    got, expected = table("max.u16x2 %d, %a, %b", "b32", "b32", [row[:3] for row in rows])
    assert got == expected
    got, expected = table(
        "max.s16x2 %d, %a, %b", "b32", "b32", [(*row[:2], (0x00010001, 0x7FFF7FFF)[k]) for k, row in enumerate(rows)]
    )
    assert got == expected
    got, expected = table("min.s16x2 %d, %a, %b", "b32", "b32", [(0xFFFF0001, 0x00018000, 0xFFFF8000)])
    assert got == expected


@pytest.mark.parametrize(
    "line", ["mul.s32 %d, %a, %a", "neg.u32 %d, %a", "add.sat.u32 %d, %a, %a", "add.s8 %d, %a, %a"]
)
def test_forms_that_ptx_has_not_are_refused(line):
    with pytest.raises(Unknown, match="line 8 of the PTX"):
        result(line, "b32", a=("b32", [0]))
