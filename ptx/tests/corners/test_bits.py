"""Bits are counted, cut out, put in, permuted and shifted; expected values are built bit by bit, or from strings."""

import itertools
import random

import pytest

from .harness import result, table

SOURCE = random.Random(7)
EDGES = [0, 1, 2, 0x80, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xFFFFFFFE, *(SOURCE.getrandbits(32) for _ in range(6))]
WIDE = [0, 1, 1 << 63, (1 << 64) - 1, 1 << 32, (1 << 32) - 1, *(SOURCE.getrandbits(64) for _ in range(6))]
COUNTS = [0, 1, 5, 8, 15, 16, 31, 32, 33, 63, 64, 65, 255, 256, 1 << 31, (1 << 32) - 1]


def text(x, width):
    return format(x, f"0{width}b")


@pytest.mark.parametrize("width, values", [(32, EDGES), (64, WIDE)])
def test_counting(width, values):
    word = f"b{width}"
    rules = {
        f"popc.b{width}": lambda x: text(x, width).count("1"),
        f"clz.b{width}": lambda x: width - len(text(x, 1).lstrip("0")),
        f"bfind.u{width}": lambda x: x.bit_length() - 1,
        f"bfind.s{width}": lambda x: (x if x < 1 << (width - 1) else (1 << width) - 1 - x).bit_length() - 1,
        f"bfind.shiftamt.u{width}": lambda x: width - x.bit_length() if x else -1,
    }
    for line, rule in rules.items():
        got, expected = table(f"{line} %d, %a", "b32", word, [(x, rule(x)) for x in values])
        assert got == expected, line
    got, expected = table(f"brev.b{width} %d, %a", word, word, [(x, int(text(x, width)[::-1], 2)) for x in values])
    assert got == expected


def extracted(a, b, c, width, signed):
    """`bfe` as the manual defines it."""
    position, length, top = b & 0xFF, c & 0xFF, width - 1
    sign = (a >> min(position + length - 1, top)) & 1 if signed and length else 0
    bits = ((a >> (position + i)) & 1 if i < length and position + i <= top else sign for i in range(width))
    return sum(bit << i for i, bit in enumerate(bits))


def inserted(a, b, c, d, width):
    """`bfi` as the manual defines it."""
    position, length = c & 0xFF, d & 0xFF
    bits = [(b >> i) & 1 for i in range(width)]
    for i in range(min(length, width - position)):
        bits[position + i] = (a >> i) & 1
    return sum(bit << i for i, bit in enumerate(bits))


@pytest.mark.parametrize("width, values", [(32, EDGES[4:10]), (64, WIDE[2:8])])
def test_fields_are_cut_out_and_put_in(width, values):
    word, rows = f"b{width}", list(itertools.product(values, COUNTS, COUNTS))
    for sign in "us":
        expected = [(*row, extracted(*row, width, sign == "s")) for row in rows]
        got, wanted = table(f"bfe.{sign}{width} %d, %a, %b, %c", word, [word, "b32", "b32"], expected)
        assert got == wanted
    expected = [(a, ~a % (1 << width), b, c, inserted(a, ~a % (1 << width), b, c, width)) for a, b, c in rows]
    got, wanted = table(f"bfi.b{width} %d, %a, %b, %c, %e", word, [word, word, "b32", "b32"], expected)
    assert got == wanted


def permuted(a, b, selector):
    data, result = (b << 32 | a).to_bytes(8, "little"), []
    for k in range(4):
        choice = selector >> 4 * k & 15
        byte = data[choice & 7]
        result.append((255 if byte & 128 else 0) if choice & 8 else byte)
    return int.from_bytes(bytes(result), "little")


def test_bytes_are_permuted_and_their_signs_spread():
    selectors = [0x3210, 0x7654, 0x0000, 0x7777, 0x5410, 0x3276, 0x8888, 0xFEDC, 0x19A4, 0xABCD3210]
    rows = [(a, b, s, permuted(a, b, s)) for a, b, s in itertools.product(EDGES[3:9], EDGES[5:11], selectors)]
    got, expected = table("prmt.b32 %d, %a, %b, %c", "b32", "b32", rows)
    assert got == expected
    for selector in selectors:  # most are constants
        some = [(a, b, permuted(a, b, selector)) for a, b, s, _ in rows if s == selector]
        got, expected = table(f"prmt.b32 %d, %a, %b, {selector}U", "b32", "b32", some)
        assert got == expected


@pytest.mark.parametrize("width", [16, 32, 64])
def test_shifts_by_the_width_and_more_leave_zeros_or_the_sign(width):
    word, mask = f"b{width}", (1 << width) - 1
    rows = list(itertools.product([x & mask for x in WIDE], COUNTS))
    rules = {
        f"shl.b{width}": lambda x, by: x << min(by, 64) & mask,
        f"shr.u{width}": lambda x, by: x >> by,
        f"shr.b{width}": lambda x, by: x >> by,
        f"shr.s{width}": lambda x, by: (x - (x >> (width - 1) << width)) >> by,
    }
    for line, rule in rules.items():
        got, expected = table(f"{line} %d, %a, %b", word, [word, "b32"], [(*row, rule(*row)) for row in rows])
        assert got == expected, line
    got, expected = table(f"shr.s{width} %d, %a, {width}", word, word, [(1 << (width - 1), -1), (1, 0)])
    assert got == expected


def test_funnel_shifts_wrap_or_clamp():
    rows = list(itertools.product(EDGES[6:10], EDGES[7:11], COUNTS))
    for limit, count in (("wrap", lambda c: c & 31), ("clamp", lambda c: min(c, 32))):
        left = [(a, b, c, ((b << 32 | a) << count(c) >> 32) & 0xFFFFFFFF) for a, b, c in rows]
        right = [(a, b, c, (b << 32 | a) >> count(c) & 0xFFFFFFFF) for a, b, c in rows]
        for side, wanted in (("l", left), ("r", right)):
            got, expected = table(f"shf.{side}.{limit}.b32 %d, %a, %b, %c", "b32", "b32", wanted)
            assert got == expected


@pytest.mark.parametrize("width", [16, 32, 64])
def test_logic(width):
    word, mask = f"b{width}", (1 << width) - 1
    values = [x & mask for x in WIDE]
    rows = list(itertools.product(values, repeat=2))
    for name, rule in {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}.items():
        got, expected = table(f"{name}.b{width} %d, %a, %b", word, word, [(*row, rule(*row)) for row in rows])
        assert got == expected
    got, expected = table(f"not.b{width} %d, %a", word, word, [(x, mask - x) for x in values])
    assert got == expected
    got, expected = table(f"cnot.b{width} %d, %a", word, word, [(x, int(x == 0)) for x in values])
    assert got == expected


def test_logic_of_predicates():
    rows = list(itertools.product((0, 1), repeat=2))
    a, b = zip(*rows, strict=True)
    for name, rule in {"and": int.__and__, "or": int.__or__, "xor": int.__xor__}.items():
        assert result(f"{name}.pred %d, %a, %b", "pred", a=("pred", a), b=("pred", b)) == [bool(rule(*r)) for r in rows]
    assert result("not.pred %d, %a", "pred", a=("pred", [0, 1])) == [True, False]
    assert result("mov.pred %d, %a", "pred", a=("pred", [0, 1])) == [False, True]


@pytest.mark.parametrize("table_", [0x00, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x1A, 0xFF])
def test_any_function_of_three_bits(table_):
    rows = list(itertools.product(EDGES[5:9], repeat=3))

    def rule(a, b, c):
        return sum((table_ >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))

    got, expected = table(f"lop3.b32 %d, %a, %b, %c, {table_}", "b32", "b32", [(*row, rule(*row)) for row in rows])
    assert got == expected
