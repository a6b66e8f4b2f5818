"""The arithmetic of `uint4.py` for GPUs, whose docstring states the format. A word is step | bottom << 16."""

# What Triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from .minmax_uint8_gpu import NAN, SMALLEST, dequantize, extremes, lowest_level, quantize


@triton.jit
def measure(x, inside, width, MASKED: tl.constexpr, DRAWN: tl.constexpr):
    low, high, broken = extremes(x, inside, MASKED)
    reach = tl.div_rn(high * 0.5 - low * 0.5, 7.0 if DRAWN else 7.5)
    reach = tl.maximum(reach, tl.div_rn(tl.maximum(tl.abs(low), tl.abs(high)), 32760.0))
    half = (tl.maximum(reach, SMALLEST).to(tl.uint32, bitcast=True) + 0xFFFF) >> 16
    scale = tl.where(broken, NAN, tl.div_rn(1.0, (half << 16).to(tl.float32, bitcast=True)))
    bottom = tl.where(broken, 0.0, lowest_level(low * scale, DRAWN)).to(tl.int32)
    return tl.where(broken, 0x7FC0, half) | bottom.to(tl.uint32, bitcast=True) << 16, scale


@triton.jit
def encode(x, word, scale, draw):
    return quantize(x, bottom_of(word), scale, draw, 15.0)


@triton.jit
def decode(codes, word):
    return dequantize(codes, (word << 16).to(tl.float32, bitcast=True), bottom_of(word))


@triton.jit
def bottom_of(word):
    return (word.to(tl.int32, bitcast=True) >> 16).to(tl.float32)


DEVICE = {"MEASURE": measure, "ENCODE": encode, "DECODE": decode, "WORD": tl.uint32, "STRIPES": 2}
