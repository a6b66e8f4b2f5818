"""The arithmetic of the formats of `float8.py` for GPUs. The word (header) of a block is the exponent field of s."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

NAN = tl.constexpr(float("nan"))
INFINITY = tl.constexpr(0x7F800000)
MANTISSA = tl.constexpr(0x600000)
M_AT, E_AT, TOP_AT = (tl.constexpr(place) for place in range(3, 6))  # of FORM: m, e, the code of the largest number


@triton.jit
def measure(x, inside, width, plain, MASKED, DRAWN, FORM):
    M: tl.constexpr = FORM[M_AT]
    E: tl.constexpr = FORM[E_AT]
    TOP: tl.constexpr = FORM[TOP_AT]
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)  # as integers magnitudes keep their order, and NaN
    exponent = (TOP >> M) - 1 + E
    field = ((top + (0x7FFFFF - MANTISSA)) >> 23) - exponent
    field = tl.minimum(tl.maximum(field, 1 + M - E), 254 - exponent)
    scale = power(254 - field)
    broken = top >= INFINITY
    return tl.where(broken, 255, field).to(tl.uint8), tl.where(broken, NAN, scale)


@triton.jit
def encode(x, word, scale, draw, FORM):
    M: tl.constexpr = FORM[M_AT]
    E: tl.constexpr = FORM[E_AT]
    TOP: tl.constexpr = FORM[TOP_AT]
    y = x * scale[None, :]
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
    return tl.where((scale == scale)[None, :], codes, 0).to(tl.uint8)


@triton.jit
def decode(codes, word, FORM):
    M: tl.constexpr = FORM[M_AT]
    # The bits of a code, read as fp32, are its value times a power of two, because the biases of the exponents differ.
    bits, field = codes.to(tl.int8, bitcast=True).to(tl.int32), word.to(tl.int32)
    small = (bits << (23 - M)) & (-0x80000000 | 0x7F << (23 - M))
    s = tl.where(field == 255, NAN, power(field))
    return small.to(tl.float32, bitcast=True) * 2.0 ** (FORM[E_AT] + 126) * s[None, :]


@triton.jit
def power(field):
    """Return the power of two in fp32 whose exponent field is `field`."""
    return (field << 23).to(tl.float32, bitcast=True)
