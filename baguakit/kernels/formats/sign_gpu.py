"""The arithmetic of `sign.py` for GPUs, whose docstring states the format. A word is the block's magnitude."""

# What Triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

INFINITY = tl.constexpr(0x7F800000)
NAN = tl.constexpr(0x7FC00000)


@triton.jit
def mean_magnitude(x, width):
    """Return s of each block, and whether one of its values is not finite."""
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # as integers magnitudes keep their order, and NaN
    field = tl.minimum(tl.maximum(top >> 23, 30), 254)
    unit, units = ((field - 16) << 23).to(tl.float32, bitcast=True), ((270 - field) << 23).to(tl.float32, bitcast=True)
    total = tl.sum((tl.abs(x) * units[:, None]).to(tl.int32), 1)
    return tl.div_rn(total.to(tl.float32), tl.zeros_like(unit) + width) * unit, top >= INFINITY


@triton.jit
def measure(x, inside, width, MASKED: tl.constexpr, DRAWN: tl.constexpr, FORM: tl.constexpr):
    s, broken = mean_magnitude(x, width)
    return tl.where(broken, NAN, s.to(tl.int32, bitcast=True)).to(tl.uint32, bitcast=True), s


@triton.jit
def encode(x, word, scale, draw, FORM: tl.constexpr):
    return ((x < 0) & (word < INFINITY)[:, None]).to(tl.uint8)


@triton.jit
def decode(codes, word, FORM: tl.constexpr):
    return (word[:, None] ^ codes.to(tl.uint32) << 31).to(tl.float32, bitcast=True)


DEVICE = {"MEASURE": measure, "ENCODE": encode, "DECODE": decode, "WORD": tl.uint32}
