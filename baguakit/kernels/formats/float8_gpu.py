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
UNIT = tl.constexpr(2.0**23)  # where fp32 holds integers only: adding it rounds to the nearest, ties to even
UNIT_BITS = tl.constexpr(0x4B000000)


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
    f = tl.maximum(((bits >> 23) & 0xFF) - (126 + E), 1)
    level = tl.abs(y) * power(128 + M - E - f)
    if draw is None:
        k = (level + UNIT).to(tl.int32, bitcast=True) - UNIT_BITS
    else:
        below = tl.floor(level)
        k = below.to(tl.int32) + (level - below > draw).to(tl.int32)
    codes = tl.minimum(((f - 1) << M) + k, TOP) | ((bits >> 24) & 0x80)
    return tl.where((scale == scale)[:, None], codes, 0).to(tl.uint8)


@triton.jit
def decode(codes, word, M: tl.constexpr, E: tl.constexpr):
    size, field = codes.to(tl.int32) & 0x7F, word.to(tl.int32)[:, None]
    f = tl.maximum(size >> M, 1)
    k = size - ((f - 1) << M)
    value = (k.to(tl.float32) * power(f - 1 + E - M + field)).to(tl.int32, bitcast=True)
    value |= (codes.to(tl.int32) & 0x80) << 24  # its sign: Triton's minus makes zero positive
    return tl.where(field == 255, NAN, value.to(tl.float32, bitcast=True))


@triton.jit
def power(field):
    """The power of two whose exponent has this field."""
    return (field << 23).to(tl.float32, bitcast=True)


@triton.jit
def measure_e4m3(x, inside, width, MASKED: tl.constexpr, DRAWN: tl.constexpr):
    return measure(x, 3, -6, 0x7E)


@triton.jit
def encode_e4m3(x, word, scale, draw):
    return encode(x, scale, draw, 3, -6, 0x7E)


@triton.jit
def decode_e4m3(codes, word):
    return decode(codes, word, 3, -6)


@triton.jit
def measure_e5m2(x, inside, width, MASKED: tl.constexpr, DRAWN: tl.constexpr):
    return measure(x, 2, -14, 0x7B)


@triton.jit
def encode_e5m2(x, word, scale, draw):
    return encode(x, scale, draw, 2, -14, 0x7B)


@triton.jit
def decode_e5m2(codes, word):
    return decode(codes, word, 2, -14)


E4M3 = {"MEASURE": measure_e4m3, "ENCODE": encode_e4m3, "DECODE": decode_e4m3, "WORD": tl.uint8, "STRIPES": 1}
E5M2 = {"MEASURE": measure_e5m2, "ENCODE": encode_e5m2, "DECODE": decode_e5m2, "WORD": tl.uint8, "STRIPES": 1}
