"""Floating-point numbers by their definition, in integers and fractions: nothing here is rounded but by `encode`."""

import functools
import itertools
import math
from fractions import Fraction

FORMATS = {"f16": (11, 5), "bf16": (8, 8), "f32": (24, 8), "f64": (53, 11)}  # bits of the significand, and exponent
# The manual's canonical NaN; in fp64 the NaN that is made of numbers is this machine's.
CANONICAL = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF}


def width(kind):
    return sum(FORMATS[kind])


def infinity(kind, negative=False):
    precision, exponent = FORMATS[kind]
    return (negative << (width(kind) - 1)) | (((1 << exponent) - 1) << (precision - 1))


def is_nan(bits, kind):
    return bits & ~(1 << (width(kind) - 1)) > infinity(kind)


def is_infinite(bits, kind):
    return bits & ~(1 << (width(kind) - 1)) == infinity(kind)


def negative(bits, kind):
    return bool(bits >> (width(kind) - 1))


@functools.cache
def decode(bits, kind):
    """The value of finite bits."""
    precision, exponent = FORMATS[kind]
    bias = (1 << (exponent - 1)) - 1
    mantissa, field = bits & ((1 << (precision - 1)) - 1), (bits >> (precision - 1)) & ((1 << exponent) - 1)
    value = Fraction(mantissa + ((field > 0) << (precision - 1))) * Fraction(2) ** (
        max(field, 1) - bias - precision + 1
    )
    return -value if negative(bits, kind) else value


def encode(value, kind, mode="rn", zero_negative=False):
    """The bits of a fraction, rounded: to nearest, ties to even (rn), toward zero (rz), down (rm), up (rp)."""
    precision, exponent = FORMATS[kind]
    bias, sign = (1 << (exponent - 1)) - 1, value < 0 or (value == 0 and zero_negative)
    size, below, lowest = abs(value.numerator), value.denominator, 1 - bias
    power = max(size.bit_length() - below.bit_length(), lowest) if size else lowest
    if power > lowest and size << max(-power, 0) < below << max(power, 0):
        power -= 1  # now 2ᵖᵒʷᵉʳ ≤ |value| < 2ᵖᵒʷᵉʳ⁺¹, unless that is subnormal
    unit = power - precision + 1
    below <<= max(unit, 0)
    whole, rest = divmod(size << max(-unit, 0), below)
    up = {
        "rn": 2 * rest > below or (2 * rest == below and whole % 2 == 1),
        "rz": False,
        "rm": sign and rest > 0,
        "rp": not sign and rest > 0,
    }[mode]
    whole += up
    largest = infinity(kind) - 1
    bits = whole + ((power - lowest) << (precision - 1))  # the leading bit adds one to the exponent's field
    if bits > largest:
        away = mode == "rn" or (mode == "rm" and sign) or (mode == "rp" and not sign)
        bits = infinity(kind) if away else largest
    return bits | (int(sign) << (width(kind) - 1))


def corners(kind):
    """Zeros, the ends of subnormal and normal numbers, ones and their neighbours, ties, infinities."""
    precision, _ = FORMATS[kind]
    one, least, largest = encode(Fraction(1), kind), 1 << (precision - 1), infinity(kind) - 1
    sizes = [0, 1, 2, least - 1, least, least + 1, one - 1, one, one + 1, one + (1 << (precision - 2)), largest - 1]
    sizes += [largest, infinity(kind), encode(Fraction(1, 3), kind), encode(Fraction(2) ** (precision - 1) + 1, kind)]
    sizes += [encode(Fraction(2) ** -precision, kind), encode(Fraction(2) ** (2 - precision) + Fraction(1), kind)]
    return [bits | (sign << (width(kind) - 1)) for bits in sizes for sign in (0, 1)]


def nans(kind):
    """Quiet and signalling, of both signs."""
    inf, sign = infinity(kind), 1 << (width(kind) - 1)
    return [
        inf + 1,
        inf + 5 | sign,
        inf | ((inf - 1) & ~inf),
        (sign - 1),
        inf | sign | (1 << (FORMATS[kind][0] - 2)) + 3,
    ]


def root(value):
    """A fraction that is rounded as the square root of `value` is, in every format: exact, or its digits and a rest."""
    shift = 1200
    scaled = value * 4**shift
    below = math.isqrt(scaled.numerator // scaled.denominator)
    return Fraction(below, 2**shift) if below * below == scaled else Fraction(2 * below + 1, 2 ** (shift + 1))


def pairs(kind):
    """Corners with corners: every other, so that each meets half of the others, and itself."""
    return list(itertools.product(corners(kind) + nans(kind), repeat=2))[::2]
