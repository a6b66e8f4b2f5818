"""The arithmetic of `minmax_uint8.py` for GPUs, whose docstring states the format. A word is step | bottom << 32."""

# What Triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ..shared.rounding_gpu import INTERPRETED

SMALLEST = tl.constexpr(2.0**-126)
NAN = tl.constexpr(float("nan"))
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def measure(x, inside, width, MASKED: tl.constexpr, DRAWN: tl.constexpr, FORM: tl.constexpr):
    low, high, broken = extremes(x, inside, MASKED)
    equal = (low == high) & (high != 0)
    spread = high * 0.5 - low * 0.5
    step = tl.where(equal, high, tl.maximum(tl.div_rn(spread, 127.0 if DRAWN else 127.5), SMALLEST))
    scale = tl.where(equal, 0.0, tl.div_rn(1.0, step))
    bottom = tl.where(equal, 1.0, lowest_level(low * scale, DRAWN))
    step, bottom = tl.where(broken, NAN, step), tl.where(broken, 0.0, bottom)
    word = step.to(tl.uint32, bitcast=True).to(tl.uint64) | bottom.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    return word, tl.where(broken, NAN, scale)


@triton.jit
def encode(x, word, scale, draw, FORM: tl.constexpr):
    return quantize(x * scale[:, None], bottom_of(word), scale, draw, 255)


@triton.jit
def decode(codes, word, FORM: tl.constexpr):
    return dequantize(codes, word.to(tl.uint32).to(tl.float32, bitcast=True), bottom_of(word))


@triton.jit
def bottom_of(word):
    return (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)


# What formats on a grid share. Step, bottom and scale are (blocks,).


@triton.jit
def extremes(x, inside, MASKED: tl.constexpr):
    """Return the lowest and the highest value of each block, and whether one is not finite."""
    low = tl.min(tl.where(inside, x, INFINITY) if MASKED else x, 1)
    high = highest(tl.where(inside, x, -INFINITY) if MASKED else x)
    if MASKED:
        empty = low > high
        low, high = tl.where(empty, 0.0, low), tl.where(empty, 0.0, high)
    return low, high, (low - low != 0) | (high - high != 0)


@triton.jit
def highest(x):
    """Return the highest value of each block: NaN, if it has one."""
    if INTERPRETED:  # it reduces by functions of ours only slowly
        high = tl.where(tl.max((x != x).to(tl.int32), 1) != 0, NAN, tl.max(x, 1))
    else:
        high = tl.reduce(x, 1, higher)
    return high


@triton.jit
def higher(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def lowest_level(low, DRAWN: tl.constexpr):
    low = tl.where(tl.abs(low) < SMALLEST, 0.0, low)
    return tl.floor(low if DRAWN else low + 0.5)


@triton.jit
def quantize(level, bottom, scale, draw, TOP: tl.constexpr):
    if draw is None:
        level = tl.floor(level + 0.5)
    else:
        below = tl.floor(level)
        level = below + (level - below > draw).to(tl.float32)
    codes = tl.minimum(tl.maximum(level - bottom[:, None], 0.0), TOP)
    return tl.where((scale == scale)[:, None], codes, 0.0).to(tl.uint8)


@triton.jit
def dequantize(codes, step, bottom):
    return (codes.to(tl.float32) + bottom[:, None]) * step[:, None]


DEVICE = {"MEASURE": measure, "ENCODE": encode, "DECODE": decode, "WORD": tl.uint64}
