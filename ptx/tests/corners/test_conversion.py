"""Conversions round once, saturate where they must, and know what NaN becomes; expected are fractions, rounded."""

import math
import random
from fractions import Fraction

import pytest

from ptx.faults import Unknown

from . import exact
from .harness import result, table

SOURCE = random.Random(11)
WORD = {8: "b8", 16: "b16", 32: "b32", 64: "b64"}
INTEGERS = [f"{sign}{width}" for width in (8, 16, 32, 64) for sign in "us"]
FLOATS = list(exact.FORMATS)
ROUND = {"rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil, "rni": round}


def limits(kind):
    width = int(kind[1:])
    return (0, (1 << width) - 1) if kind[0] == "u" else (-1 << (width - 1), (1 << (width - 1)) - 1)


def integers(kind):
    low, high = limits(kind)
    few = {low, low + 1, high, high - 1, 0, 1, 2, high // 2, high // 2 + 1, (1 << 24) + 1, (1 << 53) + 1, (1 << 25) + 3}
    few |= {-1, -2, SOURCE.randint(low, high), SOURCE.randint(low, high), SOURCE.randint(low, high)}
    return sorted(x for x in few if low <= x <= high)


def word(kind):
    """A register for a type: there is none of eight bits that arithmetic takes."""
    return WORD[max(16, exact.width(kind) if kind in FLOATS else int(kind[1:]))]


@pytest.mark.parametrize("to", INTEGERS)
def test_integers_become_their_last_bits_or_the_nearest(to):
    width, size, (low, high) = int(word(to)[1:]), int(to[1:]), limits(to)

    def cut(x):
        x %= 1 << size
        return x - (1 << size) if x > high else x

    for of in INTEGERS:
        for modifier, rule in (("", cut), (".sat", lambda x: min(max(x, low), high))):
            rows = [(x % (1 << int(of[1:])), rule(x) % (1 << width)) for x in integers(of)]
            got, expected = table(f"cvt{modifier}.{to}.{of} %d, %a", word(to), word(of), rows)
            assert got == expected, (of, modifier)


def test_a_source_is_cut_to_its_type_first():
    rows = [(0x1FF, 0xFFFF), (0x80, 0xFF80), (0xFF7F, 0x7F)]
    got, expected = table("cvt.s16.s8 %d, %a", "b16", "b16", rows)
    assert got == expected
    got, expected = table("cvt.u64.u32 %d, %a", "b64", "b64", [(1 << 40 | 5, 5)])
    assert got == expected


MODES = [("f32", mode) for mode in ("rn", "rz", "rm", "rp")] + [("f64", "rn"), ("f16", "rn"), ("bf16", "rn")]


@pytest.mark.parametrize("to, mode", MODES)
def test_integers_are_rounded_once(to, mode):
    for of in INTEGERS:
        if int(of[1:]) == 64 and (mode != "rn" or to in ("f16", "bf16")):
            continue
        rows = [(x % (1 << int(of[1:])), exact.encode(Fraction(x), to, mode)) for x in integers(of)]
        got, expected = table(f"cvt.{mode}.{to}.{of} %d, %a", word(to), word(of), rows)
        assert got == expected, of


def whole_numbers(kind):
    """Ties, neighbours of the limits of all integers, and corners."""
    ties = [Fraction(k, 4) for k in range(-11, 12)] + [Fraction(2 * k + 1, 2) for k in (126, 127, 254, 255, 32767)]
    ends = [Fraction(1 << k) + d for k in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, 0, 1)]
    some = [exact.encode(sign * x, kind) for x in ties + ends for sign in (1, -1)]
    return some + exact.corners(kind) + exact.nans(kind)


@pytest.mark.parametrize("of", FLOATS)
@pytest.mark.parametrize("mode", ROUND)
def test_floats_become_the_nearest_integers(of, mode):
    values = whole_numbers(of)
    for to in INTEGERS:
        low, high = limits(to)

        def rule(x, to=to, low=low, high=high):
            if exact.is_nan(x, of):
                return 1 << (int(to[1:]) - 1) if of == "f64" or int(to[1:]) == 64 else 0
            if exact.is_infinite(x, of):
                return low if exact.negative(x, of) else high
            return min(max(ROUND[mode](exact.decode(x, of)), low), high)

        width = int(word(to)[1:])
        rows = [(x, rule(x) % (1 << width)) for x in values]
        if to in ("s8", "s16"):  # a NaN of fp64: the number whose highest bit is set is negative, and its sign extends
            rows = [(x, y if not exact.is_nan(x, of) or of != "f64" else -1 << (int(to[1:]) - 1)) for x, y in rows]
        got, expected = table(f"cvt.{mode}.{to}.{of} %d, %a", word(to), word(of), rows)
        assert got == expected, to


def converted(x, to, of, mode):
    if exact.is_nan(x, of):
        return exact.CANONICAL[to]
    if exact.is_infinite(x, of):
        return exact.infinity(to, exact.negative(x, of))
    return exact.encode(exact.decode(x, of), to, mode, exact.negative(x, of))


NARROWER = [("f32", "f64", mode) for mode in ("rn", "rz", "rm", "rp")]
NARROWER += [(half, "f32", "rn") for half in ("f16", "bf16")] + [("f16", "f64", "rn")]


@pytest.mark.parametrize("to, of, mode", NARROWER)
def test_floats_become_narrower_rounded_once(to, of, mode):
    precision = exact.FORMATS[to][0]
    ties = [1 + Fraction(k, 1 << (precision + 1)) for k in range(8)]
    ties += [tie + e * Fraction(1, 1 << (exact.FORMATS[of][0] - 1)) for tie in ties for e in (1, -1)]
    small = exact.decode(1, to)
    ties += [small * Fraction(k, 8) for k in range(1, 20)] + [
        exact.decode(exact.infinity(to) - 1, to) * Fraction(k, 1 << (precision + 2))
        for k in range((1 << (precision + 2)) - 4, (1 << (precision + 2)) + 6)
    ]
    values = [exact.encode(sign * x, of) for x in ties for sign in (1, -1)]
    values += exact.corners(of) + exact.nans(of) + [SOURCE.getrandbits(exact.width(of)) for _ in range(200)]
    rows = [(x, converted(x, to, of, mode)) for x in values]
    got, expected = table(f"cvt.{mode}.{to}.{of} %d, %a", word(to), word(of), rows)
    assert got == expected


@pytest.mark.parametrize("to, of", [("f32", "f16"), ("f32", "bf16"), ("f64", "f32"), ("f64", "f16"), ("f64", "bf16")])
def test_floats_become_wider_exactly(to, of):
    values = exact.corners(of) + [x for x in map(SOURCE.getrandbits, [exact.width(of)] * 50) if not exact.is_nan(x, of)]
    got, expected = table(
        f"cvt.{to}.{of} %d, %a", word(to), word(of), [(x, converted(x, to, of, "rn")) for x in values]
    )
    assert got == expected
    assert all(exact.is_nan(x, to) for x in result(f"cvt.{to}.{of} %d, %a", word(to), a=(word(of), exact.nans(of))))


@pytest.mark.parametrize("half", ["f16", "bf16"])
def test_two_become_a_pair_the_first_above(half):
    values = exact.corners("f32") + exact.nans("f32")
    rows = [
        (a, b, converted(a, half, "f32", "rn") << 16 | converted(b, half, "f32", "rn"))
        for a, b in zip(values, values[::-1], strict=True)
    ]
    got, expected = table(f"cvt.rn.{half}x2.f32 %d, %a, %b", "b32", "b32", rows)
    assert got == expected


def test_floats_are_rounded_to_integers_and_zeros_keep_their_sign():
    half, minus = 0x3F000000, 0x80000000
    rows = [
        (half, 0),
        (half | minus, 0xBF800000),
        (minus, minus),
        (1, 0),
        (1 | minus, 0xBF800000),
        (0x7F800000, 0x7F800000),
    ]
    got, expected = table("cvt.rmi.f32.f32 %d, %a", "b32", "b32", [*rows, (0x7F800001, 0x7FFFFFFF)])
    assert got == expected
    rows[4] = (1 | minus, minus)  # flushed before it is rounded down
    got, expected = table("cvt.rmi.ftz.f32.f32 %d, %a", "b32", "b32", rows)
    assert got == expected
    ties = [(0x3F000000, 0), (0x3FC00000, 0x40000000), (0x40200000, 0x40000000), (0xBF000000, minus)]
    got, expected = table("cvt.rni.f32.f32 %d, %a", "b32", "b32", ties)
    assert got == expected


def test_saturated_floats():
    rows = [(0x40000000, 0x3F800000), (0xBF800000, 0), (0x7FC00000, 0), (0x80000000, 0), (0x3F000000, 0x3F000000)]
    got, expected = table("cvt.sat.f32.f32 %d, %a", "b32", "b32", rows)
    assert got == expected


@pytest.mark.parametrize(
    "line", ["cvt.f16.f32 %d, %a", "cvt.s32.f32 %d, %a", "cvt.f32.s32 %d, %a", "cvt.rn.e4m3x2.f32 %d, %a, %a"]
)
def test_conversions_without_rounding_are_refused(line):
    with pytest.raises(Unknown, match="line 8 of the PTX"):
        result(line, "b32" if "f16" not in line else "b16", a=("b32", [0]))
