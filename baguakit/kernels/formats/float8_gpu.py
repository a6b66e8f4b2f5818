"""The arithmetic of `float8.py` for GPUs, whose docstring states the formats. A word is the exponent's field of s.

M, E    bits of the mantissa, and exponent of the smallest normal number
TOP     the code of the largest number
"""

# What Triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

NAN = tl.constexpr(float("nan"))
INFINITY = tl.constexpr(0x7F800000)
MANTISSA = tl.constexpr(0x600000)
E4M3_OFF, E5M2_OFF = tl.constexpr(2.0**120), tl.constexpr(2.0**112)  # 2ᵉ⁺¹²⁶


@triton.jit
def measure(x, M: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr):
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # as integers magnitudes keep their order, and NaN
    exponent = (TOP >> M) - 1 + E
    field = ((top + (0x7FFFFF - MANTISSA)) >> 23) - exponent
    field = tl.minimum(tl.maximum(field, 1 + M - E), 254 - exponent)
    scale = power(254 - field)
    broken = top >= INFINITY
    return tl.where(broken, 255, field).to(tl.uint8), tl.where(broken, NAN, scale)


@triton.jit
def encode(x, scale, draw, M: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr):
    y = x * scale[:, None]
    bits = y.to(tl.int32, bitcast=True)
    binade = tl.maximum(bits & INFINITY, (127 + E) << 23)  # the least power of two of |y|, or that of subnormal codes
    if draw is None:
        unit = binade + ((23 - M) << 23)  # whose neighbours lie as far apart as those of codes: adding it rounds
        k = (tl.abs(y) + unit.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - unit
    else:
        level = tl.abs(y) * power(254 + M - (binade >> 23))
        below = tl.floor(level)
        k = below.to(tl.int32) + (level - below > draw).to(tl.int32)
    codes = tl.minimum((binade >> (23 - M)) - ((127 + E) << M) + k, TOP) | ((bits >> 24) & 0x80)
    return tl.where((scale == scale)[:, None], codes, 0).to(tl.uint8)


@triton.jit
def decode(codes, word, M: tl.constexpr, OFF: tl.constexpr):
    # A code is fp32 with fewer bits for the exponent, and so off by a power of two.
    bits, field = codes.to(tl.int8, bitcast=True).to(tl.int32), word.to(tl.int32)
    small = (bits << (23 - M)) & (-0x80000000 | 0x7F << (23 - M))
    s = tl.where(field == 255, NAN, power(field))
    return small.to(tl.float32, bitcast=True) * OFF * s[:, None]


@triton.jit
def power(field):
    """Return the power of two whose exponent has this field."""
    return (field << 23).to(tl.float32, bitcast=True)


@triton.jit
def measure_e4m3(x, inside, width, MASKED: tl.constexpr, DRAWN: tl.constexpr, FORM: tl.constexpr):
    return measure(x, 3, -6, 0x7E)


@triton.jit
def encode_e4m3(x, word, scale, draw, FORM: tl.constexpr):
    return encode(x, scale, draw, 3, -6, 0x7E)


@triton.jit
def decode_e4m3(codes, word, FORM: tl.constexpr):
    return decode(codes, word, 3, E4M3_OFF)


@triton.jit
def measure_e5m2(x, inside, width, MASKED: tl.constexpr, DRAWN: tl.constexpr, FORM: tl.constexpr):
    return measure(x, 2, -14, 0x7B)


@triton.jit
def encode_e5m2(x, word, scale, draw, FORM: tl.constexpr):
    return encode(x, scale, draw, 2, -14, 0x7B)


@triton.jit
def decode_e5m2(codes, word, FORM: tl.constexpr):
    return decode(codes, word, 2, E5M2_OFF)


E4M3 = {"MEASURE": measure_e4m3, "ENCODE": encode_e4m3, "DECODE": decode_e4m3, "WORD": tl.uint8}
E5M2 = {"MEASURE": measure_e5m2, "ENCODE": encode_e5m2, "DECODE": decode_e5m2, "WORD": tl.uint8}
