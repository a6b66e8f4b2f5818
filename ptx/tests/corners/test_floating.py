"""Sums, products, quotients and roots are rounded once; NaN, zeros, infinities and subnormals are as stated."""

import itertools
import random
from fractions import Fraction

import pytest

from ptx.faults import Unknown

from . import exact
from .harness import result, table

ANY = None  # a NaN, whichever


def added(a, b, kind, mode, sign=1):
    """Bits of a + sign · b."""
    b = b if sign > 0 or exact.is_nan(b, kind) else b ^ (1 << (exact.width(kind) - 1))
    if exact.is_nan(a, kind) or exact.is_nan(b, kind):
        return ANY
    infinite = [x for x in (a, b) if exact.is_infinite(x, kind)]
    if infinite:
        return infinite[0] if len(set(infinite)) == 1 else ANY
    total = exact.decode(a, kind) + exact.decode(b, kind)
    signs = exact.negative(a, kind), exact.negative(b, kind)
    return exact.encode(total, kind, mode, all(signs) or (mode == "rm" and any(signs) and total == 0))


def multiplied(a, b, kind, mode):
    if exact.is_nan(a, kind) or exact.is_nan(b, kind):
        return ANY
    sign, zero = exact.negative(a, kind) != exact.negative(b, kind), 1 << (exact.width(kind) - 1)
    if exact.is_infinite(a, kind) or exact.is_infinite(b, kind):
        return ANY if 0 in (a & ~zero, b & ~zero) else exact.infinity(kind, sign)
    return exact.encode(exact.decode(a, kind) * exact.decode(b, kind), kind, mode, sign)


def divided(a, b, kind, mode):
    if exact.is_nan(a, kind) or exact.is_nan(b, kind):
        return ANY
    sign, size = exact.negative(a, kind) != exact.negative(b, kind), (1 << (exact.width(kind) - 1)) - 1
    infinite = exact.is_infinite(a, kind), exact.is_infinite(b, kind)
    if all(infinite) or a & size == b & size == 0:
        return ANY
    if infinite[0] or b & size == 0:
        return exact.infinity(kind, sign)
    if infinite[1]:
        return exact.encode(Fraction(0), kind, mode, sign)
    return exact.encode(exact.decode(a, kind) / exact.decode(b, kind), kind, mode, sign)


def rooted(a, kind, mode):
    if exact.is_nan(a, kind) or (exact.negative(a, kind) and a << 1 & (1 << exact.width(kind)) - 1):
        return ANY
    if exact.is_infinite(a, kind) or exact.decode(a, kind) == 0:
        return a
    return exact.encode(exact.root(exact.decode(a, kind)), kind, mode)


def fused(a, b, c, kind, mode):
    if any(exact.is_nan(x, kind) for x in (a, b, c)):
        return ANY
    product = multiplied(a, b, kind, "rz")
    infinite = exact.is_infinite(a, kind) or exact.is_infinite(b, kind)
    if product is ANY or (infinite and exact.is_infinite(c, kind) and product != c):
        return ANY
    if infinite or exact.is_infinite(c, kind):
        return product if infinite else c
    total = exact.decode(a, kind) * exact.decode(b, kind) + exact.decode(c, kind)
    signs = exact.negative(a, kind) != exact.negative(b, kind), exact.negative(c, kind)
    return exact.encode(total, kind, mode, all(signs) or (mode == "rm" and any(signs) and total == 0))


def drawn(kind, count, seed):
    """Bits of every scale, subnormals and NaN among them."""
    source = random.Random(seed)
    return [source.getrandbits(exact.width(kind)) for _ in range(count)]


def same(got, expected, kind):
    """Equal bits; of fp32 and halves NaN is canonical, of fp64 it is quiet."""
    for bits, wanted in zip(got, expected, strict=True):
        if wanted is ANY:
            wanted = exact.CANONICAL.get(kind, bits | (1 << 51))
            assert exact.is_nan(bits, kind)
        assert hex(bits) == hex(wanted)


WORDS = {"f32": ("b32", ("rn", "rz", "rm", "rp")), "f64": ("b64", ("rn",))}
SCALARS = [(kind, mode) for kind, (_, modes) in WORDS.items() for mode in modes]


@pytest.mark.parametrize("kind, mode", SCALARS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "div"])
def test_two_sources_are_rounded_once(name, kind, mode):
    rule = {"add": added, "sub": lambda *x: added(*x, -1), "mul": multiplied, "div": divided}[name]
    rows = exact.pairs(kind) + list(zip(drawn(kind, 200, 1), drawn(kind, 200, 2), strict=True))
    a, b = zip(*rows, strict=True)
    word = WORDS[kind][0]
    got = result(f"{name}.{mode}.{kind} %d, %a, %b", word, a=(word, a), b=(word, b))
    same(got, [rule(*row, kind, mode) for row in rows], kind)


@pytest.mark.parametrize("kind, mode", SCALARS)
def test_roots_and_inverses_are_rounded_once(kind, mode):
    values = exact.corners(kind) + exact.nans(kind) + drawn(kind, 300, 3)
    word = WORDS[kind][0]
    got = result(f"sqrt.{mode}.{kind} %d, %a", word, a=(word, values))
    same(got, [rooted(x, kind, mode) for x in values], kind)
    one = exact.encode(Fraction(1), kind)
    got = result(f"rcp.{mode}.{kind} %d, %a", word, a=(word, values))
    same(got, [divided(one, x, kind, mode) for x in values], kind)


@pytest.mark.parametrize("kind, mode", SCALARS)
def test_a_product_and_its_sum_are_rounded_once(kind, mode):
    few = exact.corners(kind)[::4] + exact.nans(kind)[:2]
    rows = list(itertools.product(few, repeat=3))
    rows += zip(*(drawn(kind, 300, seed) for seed in (4, 5, 6)), strict=True)
    # Near a tie only the last bits of the product tell; and a sum that nearly cancels.
    one, width = exact.encode(Fraction(1), kind), exact.width(kind)
    tie = exact.encode(1 + Fraction(2) ** (1 - exact.FORMATS[kind][0]), kind)
    half = exact.encode(Fraction(2) ** -exact.FORMATS[kind][0], kind)
    rows += [
        (one, tie, half),
        (tie, tie, half),
        (tie, tie, half | 1 << (width - 1)),
        (tie, tie, tie | 1 << (width - 1)),
    ]
    rows += [(tie, half, one), (half, tie, one), (half, half, one), (half | 1 << (width - 1), half, one)]
    a, b, c = zip(*rows, strict=True)
    word = WORDS[kind][0]
    got = result(f"fma.{mode}.{kind} %d, %a, %b, %c", word, a=(word, a), b=(word, b), c=(word, c))
    same(got, [fused(*row, kind, mode) for row in rows], kind)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_halves_are_rounded_once_each_of_a_pair_by_itself(name, kind):
    rule = {"add": added, "sub": lambda *x: added(*x, -1), "mul": multiplied, "fma": fused}[name]
    count = 3 if name == "fma" else 2
    values = exact.corners(kind) + exact.nans(kind)
    rows = list(itertools.product(values[:: 3 * count - 5], repeat=count))
    rows += zip(*(drawn(kind, 300, seed) for seed in range(count)), strict=True)
    rows += rows[: len(rows) % 2]
    low, high = rows[::2], rows[1::2]
    words = [
        [x | y << 16 for x, y in zip(a, b, strict=True)]
        for a, b in zip(zip(*low, strict=True), zip(*high, strict=True), strict=True)
    ]
    sources = {letter: ("b32", word) for letter, word in zip("abc", words, strict=False)}
    operands = ", ".join(f"%{letter}" for letter in sources)
    got = result(f"{name}.rn.{kind}x2 %d, {operands}", "b32", **sources)
    same([x & 0xFFFF for x in got], [rule(*row, kind, "rn") for row in low], kind)
    same([x >> 16 for x in got], [rule(*row, kind, "rn") for row in high], kind)


def test_pairs_of_fp32_are_two_of_fp32():
    rows = exact.pairs("f32")
    low, high = rows[:-1:2], rows[1::2]
    a, b = ([x[k] | y[k] << 32 for x, y in zip(low, high, strict=True)] for k in (0, 1))
    for name, rule in (("add", added), ("mul", multiplied), ("sub", lambda *x: added(*x, -1))):
        got = result(f"{name}.rn.f32x2 %d, %a, %b", "b64", a=("b64", a), b=("b64", b))
        same([x & 0xFFFFFFFF for x in got], [rule(*row, "f32", "rn") for row in low], "f32")
        same([x >> 32 for x in got], [rule(*row, "f32", "rn") for row in high], "f32")


def test_products_and_sums_of_pairs_of_fp32_are_rounded_once():
    rows = list(itertools.product(exact.corners("f32")[::5] + exact.nans("f32")[:1], repeat=3))
    rows += rows[: len(rows) % 2]
    low, high = rows[::2], rows[1::2]
    words = [[x[k] | y[k] << 32 for x, y in zip(low, high, strict=True)] for k in range(3)]
    got = result(
        "fma.rn.f32x2 %d, %a, %b, %c", "b64", **{name: ("b64", word) for name, word in zip("abc", words, strict=True)}
    )
    same([x & 0xFFFFFFFF for x in got], [fused(*row, "f32", "rn") for row in low], "f32")
    same([x >> 32 for x in got], [fused(*row, "f32", "rn") for row in high], "f32")


def test_a_sum_that_states_no_rounding_is_rounded_to_nearest():
    rows = [
        (ONE, 0x33000000, ONE),
        (ONE, 0x33000001, ONE - 1),
        (ONE, 0x33800000, ONE - 1),
        (ONE, ONE, 0),
        (0, MINUS, 0),
    ]
    got, expected = table("sub.f32 %d, %a, %b", "b32", "b32", rows)
    assert got == expected


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_a_half_and_fp32_meet_in_fp32(kind):
    """The half is widened exactly."""
    rows = list(itertools.product(exact.corners(kind)[::3], exact.corners("f32")))
    wide = [exact.encode(exact.decode(a, kind), "f32", "rn", exact.negative(a, kind)) if not exact.is_infinite(a, kind)
            else exact.infinity("f32", exact.negative(a, kind)) for a, _ in rows]  # fmt: skip
    a, b = zip(*rows, strict=True)
    for name, sign in (("add", 1), ("sub", -1)):
        got = result(f"{name}.rn.f32.{kind} %d, %a, %b", "b32", a=("b16", a), b=("b32", b))
        same(got, [added(x, y, "f32", "rn", sign) for x, y in zip(wide, b, strict=True)], "f32")


ONE, LEAST, SUBNORMAL, NAN = 0x3F800000, 0x00800000, 0x007FFFFF, 0x7FC00000
MINUS = 0x80000000


def test_flushing_takes_subnormals_of_sources_and_results_for_zeros_of_their_sign():
    rows = [
        (SUBNORMAL, ONE, ONE), (SUBNORMAL, SUBNORMAL, 0), (SUBNORMAL | MINUS, 1 | MINUS, MINUS),
        (LEAST + 1, LEAST | MINUS, 0), (LEAST | MINUS, LEAST, 0), (LEAST, LEAST, LEAST + LEAST),
        (LEAST | MINUS, LEAST + 1, 0), (LEAST, (LEAST + 1) | MINUS, MINUS),
    ]  # fmt: skip
    got, expected = table("add.rn.ftz.f32 %d, %a, %b", "b32", "b32", rows)
    assert got == expected
    unflushed = [(SUBNORMAL, 1, LEAST), (LEAST + 1, LEAST | MINUS, 1), (SUBNORMAL, 0, SUBNORMAL)]
    got, expected = table("add.rn.f32 %d, %a, %b", "b32", "b32", unflushed)
    assert got == expected
    halved = [(LEAST, 0x3F000000, 0), (LEAST | MINUS, 0x3F000000, MINUS), (LEAST + LEAST, 0x3F000000, LEAST)]
    got, expected = table("mul.rn.ftz.f32 %d, %a, %b", "b32", "b32", halved)
    assert got == expected


def test_saturation_is_between_zero_and_one_and_makes_nan_zero():
    rows = [
        (ONE, ONE, ONE),
        (0x3E800000, 0x3E800000, 0x3F000000),
        (ONE | MINUS, 0, 0),
        (NAN, ONE, 0),
        (MINUS, MINUS, 0),
    ]
    rows += [(0x7F800000, ONE, ONE), (0xFF800000, ONE, 0), (1, 1, 2)]
    got, expected = table("add.rn.sat.f32 %d, %a, %b", "b32", "b32", rows)
    assert got == expected
    got, expected = table("add.rn.ftz.sat.f32 %d, %a, %b", "b32", "b32", [(SUBNORMAL, 1, 0), (ONE, ONE, ONE)])
    assert got == expected


def test_nan_of_fp64_is_passed_on_with_its_quiet_bit():
    quiet, signalling, other = 0x7FF8000000000123, 0x7FF0000000000456, 0xFFFABCDEF0123456
    rows = [(quiet, 0, quiet), (0, signalling, signalling | 1 << 51), (other, 1, other), (other, quiet, other)]
    rows += [(0x7FF0000000000000, 0xFFF0000000000000, 0xFFF8000000000000)]
    got, expected = table("add.rn.f64 %d, %a, %b", "b64", "b64", rows)
    assert got == expected


@pytest.mark.parametrize(
    "line, word",
    [
        ("ex2.approx.f16 %d, %a", "type"),
        ("sinh.approx.f32 %d, %a", "instruction"),
        ("add.rz.f64 %d, %a, %a", "rounding"),
        ("fma.f32 %d, %a, %a, %a", "rounding"),
    ],
)
def test_what_has_no_stated_bits_is_refused(line, word):
    kind = "b64" if "f64" in line else "b32"
    with pytest.raises(Unknown, match=r"line 8 of the PTX, `.*`: the executor knows no .*"):
        result(line, kind, a=(kind, [0]))
