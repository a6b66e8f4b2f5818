"""The arithmetic of `uniform.py` for GPUs, whose docstring states the format. A word is step | bottom << 16."""

# What Triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ..blockwise.gpu import BITS, ROTATED
from .minmax_uint8_gpu import NAN, SMALLEST, extremes, lowest_level, quantize

REACH, LARGEST, NAN_STEP = tl.constexpr(32760.0), tl.constexpr(2.0**127), tl.constexpr(0x7FC0)
LARGEST_BF16 = tl.constexpr(255 * 2.0**120)
LEAST = tl.constexpr(0x0080)  # 2⁻¹²⁶ in bf16
INFINITY_BITS = tl.constexpr(0x7F800000)
TWO, THREE = tl.constexpr(1.2479), tl.constexpr(0.7344)  # spacings


@triton.jit
def measure(x, inside, width, MASKED: tl.constexpr, DRAWN: tl.constexpr, FORM: tl.constexpr):
    TOP: tl.constexpr = (1 << FORM[BITS]) - 1
    if FORM[BITS] == 1 or (FORM[ROTATED] and FORM[BITS] <= 3 and not DRAWN):  # a grid about zero
        if DRAWN:
            size, broken = tl.max(tl.abs(x), 1), tl.max((x - x != 0).to(tl.int32), 1) != 0  # max drops NaN
        else:
            size, broken = mean_magnitude(x, width)
        step = size * (2.0 if DRAWN or FORM[BITS] == 1 else TWO if FORM[BITS] == 2 else THREE)
        half = tl.where(size == 0, 0, bf16_above(tl.minimum(tl.maximum(step, SMALLEST), LARGEST)))
        bottom = tl.zeros_like(step) - TOP
    else:
        low, high, broken = extremes(x, inside, MASKED)
        reach = tl.div_rn(tl.maximum(tl.abs(low), tl.abs(high)), REACH / 2 if FORM[ROTATED] else REACH)
        step = tl.maximum(reach, tl.div_rn(high * 0.5 - low * 0.5, (TOP - 1) / 2 if DRAWN else TOP / 2))
        half = bf16_above(tl.minimum(tl.maximum(step, SMALLEST), LARGEST_BF16))
        bottom = lowest_level(low * tl.div_rn(1.0, from_bf16(half)), DRAWN) * (2 if FORM[ROTATED] else 1)
    scale = tl.where(half == 0, 0.0, tl.div_rn(1.0, from_bf16(tl.maximum(half, LEAST))))
    bottom = tl.where(broken, 0.0, bottom).to(tl.int32)
    word = tl.where(broken, NAN_STEP, half) | bottom.to(tl.uint32, bitcast=True) << 16
    return word, tl.where(broken, NAN, scale)


@triton.jit
def mean_magnitude(x, width):
    """Return the mean |x| of each block, and whether one of its values is not finite."""
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # as integers magnitudes keep their order, and NaN
    field = tl.minimum(tl.maximum(top >> 23, 30), 254)
    unit, units = ((field - 16) << 23).to(tl.float32, bitcast=True), ((270 - field) << 23).to(tl.float32, bitcast=True)
    total = tl.sum((tl.abs(x) * units[:, None]).to(tl.int32), 1)
    return tl.div_rn(total.to(tl.float32), tl.zeros_like(unit) + width) * unit, top >= INFINITY_BITS


@triton.jit
def encode(x, word, scale, draw, FORM: tl.constexpr):
    TOP: tl.constexpr = (1 << FORM[BITS]) - 1
    if FORM[BITS] == 1 and draw is None:
        codes = ((x >= 0) & (scale == scale)[:, None]).to(tl.uint8)
    elif FORM[BITS] == 1 or (FORM[ROTATED] and FORM[BITS] <= 3 and draw is None):
        codes = quantize(x * scale[:, None] + TOP / 2, tl.zeros_like(scale), scale, draw, TOP)
    else:
        codes = quantize(x * scale[:, None], bottom_of(word, FORM), scale, draw, TOP)
    return codes


@triton.jit
def decode(codes, word, FORM: tl.constexpr):
    step = from_bf16(word)
    if FORM[BITS] == 1:  # half a step with a sign
        below = (step * -0.5).to(tl.uint32, bitcast=True)
        values = (below[:, None] ^ codes.to(tl.uint32) << 31).to(tl.float32, bitcast=True)
    else:
        # 2²³ + code, by its bits, and bottom − 2²³, both exact: |bottom| < 2¹⁵. Conversions are slow. With halves, 2²².
        HALVES: tl.constexpr = FORM[ROTATED]
        shifted = ((codes.to(tl.uint32) << 1) | 0x4A800000) if HALVES else (codes.to(tl.uint32) | 0x4B000000)
        origin = bottom_of(word, FORM) - (4194304.0 if HALVES else 8388608.0)
        values = (shifted.to(tl.float32, bitcast=True) + origin[:, None]) * step[:, None]
    return values


@triton.jit
def bottom_of(word, FORM: tl.constexpr):
    bottom = (word.to(tl.int32, bitcast=True) >> 16).to(tl.float32)
    return bottom * 0.5 if FORM[ROTATED] else bottom


@triton.jit
def bf16_above(x):
    return (x.to(tl.uint32, bitcast=True) + 0xFFFF) >> 16


@triton.jit
def from_bf16(half):
    return (half << 16).to(tl.float32, bitcast=True)


DEVICE = {"MEASURE": measure, "ENCODE": encode, "DECODE": decode, "WORD": tl.uint32}
