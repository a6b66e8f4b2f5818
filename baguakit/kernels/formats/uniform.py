"""One to eight bits a value: each block on a grid of 2ᵇ levels of its own, headed by four bytes.

    top    = 2ᵇ − 1
    step   = max((high − low) / top, max |x| / reach, 2⁻¹²⁶), rounded up to bf16; at most the largest bf16
    bottom = ⌊low · (1 / step) + ½⌋                  an int16
    code   = ⌊x · (1 / step) + ½⌋ − bottom           clamped to 0 … top
    x′     = (code + bottom) · step                  |x′ − x| ≤ step / 2 + a few ulps of the largest |x|

Every level is an integer times the step, so zero survives exactly. Where bits are few the header weighs: (step, bottom)
as the halves of an int32 take 4.125 bits a value in blocks of 256, where two fp32 would take 4.25, and a step that is
at most 2⁻⁷ wider costs less than the larger blocks that would make up for it. So the error of four bits is at most
1.008 times (high − low) / 30; where a block is narrow and far from zero, 1.008 times max |x| / 65520, for bottom must
be an int16 (reach = 32760); and where its values are tiny, 2⁻¹²⁷. A block that holds a NaN or an infinity takes the
step 0x7fc0, bottom and codes 0, and reads as NaN throughout. The grid reaches half a step past the block: of four bits
only values within 4 % of the largest fp32 can read as infinite, and no finite block as NaN: only of two bits and draws
could a step, then half the range, lie above the largest bf16.

Rounding by draws is unbiased: the range is divided by top − 1 and bottom is ⌊low / step⌋, so that both neighbours of
each value are levels, and the upper one is taken with probability x / step − ⌊x / step⌋.

Rotated blocks (`shared/rotation.py`) are nearly normal, and a grid that reaches their farthest values wastes levels
where bits are few. So of up to three bits, to the nearest, and of one bit always, the grid lies about zero:

    step   = spacing · mean |x|                      rounded up to bf16; of draws, 2 · max |x|; zero if all values are
    bottom = −top / 2
    code   = ⌊x · (1 / step) + 2ᵇ⁻¹⌋                 clamped to 0 … top; of draws, the neighbours of x / step − bottom;
                                                     of one bit 1 if x ≥ 0, else 0

with spacing = Δ √(π / 2), and Δ the step of least error for normal values of variance 1 (Max 1960, "Quantizing for
minimum distortion": 1.596, 0.9957 and 0.5860 for one to three bits, with errors 0.363, 0.119 and 0.0374). Of one bit
that is the mean magnitude times the sign: of what one magnitude can say the nearest, ‖x′ − x‖² = ‖x‖² − ‖x‖₁² / width
but for the rounding of the step. Where a grid may lie about zero, bottom is counted in halves of a step, and reach is
16380. The mean is summed in integers, at most 8192 of 17 bits, so that their order cannot matter:

    mean |x| = Σ ⌊|x| / u⌋ / width · u               u = 2⁻¹⁷ of the least power of two above max |x|, at least 2⁻¹¹³,
                                                     so that no device meets a subnormal

This file is the definition; `uniform_gpu.py` holds the same arithmetic for GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..blockwise.format import Format
from ..blockwise.operators import Operators, operators
from . import minmax_uint8
from .minmax_uint8 import NAN, SMALLEST, dequantize, lowest_level, quantize

REACH = 32760.0  # how many halves of a step, or steps, from zero a value may be
NAN_STEP = 0x7FC0  # in bf16
LARGEST = 2.0**127  # step about zero
LARGEST_BF16 = torch.finfo(torch.bfloat16).max
FIELD = 30  # the least field of an exponent that max |x| is taken to have: u is 2⁻¹¹³, and u / 8192 is normal
DIGITS = 17  # of the integers that are summed: 8192 of them fit 31 bits
SPACINGS = {1: 2.0, 2: 1.2479, 3: 0.7344}  # of levels about zero, in mean magnitudes


@dataclass(frozen=True, eq=False)
class UniformFormat(Format):
    """The format of this file, of so many bits."""

    bits: int
    rotated: bool = False

    header = (torch.int32, 1)

    @property
    def name(self) -> str:
        return f"uint{self.bits}" + "_rotated" * self.rotated

    @property
    def padded(self) -> bool:
        return self.rotated or self.bits not in (1, 2, 4, 8)

    @property
    def unit(self) -> float:
        """Return the unit of bottoms, in steps."""
        return 0.5 if self.rotated or self.bits == 1 else 1.0

    def about_zero(self, drawn: bool) -> bool:
        """Return whether the grid of a block lies about zero, and not between its extremes."""
        return self.bits == 1 or (self.rotated and not drawn and self.bits in SPACINGS)

    def measure(self, x: Tensor, drawn: bool) -> tuple[Tensor, Tensor]:
        top = (1 << self.bits) - 1
        if self.about_zero(drawn):
            size = x.abs().amax(-1, keepdim=True) if drawn else mean_magnitude(x)
            broken = size - size != 0  # amax passes NaN on, here and below
            step = (size * (2.0 if drawn else SPACINGS[self.bits])).clamp(SMALLEST, LARGEST)
            half = torch.where(size == 0, 0, bf16_above(step))
            bottom = torch.full_like(size, -top)
        else:
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
            spread = high * 0.5 - low * 0.5
            broken = spread - spread != 0
            reach = torch.maximum(low.abs(), high.abs()) / x.new_full((1,), REACH * self.unit)
            step = torch.maximum(reach, spread / x.new_full((1,), (top - drawn) / 2))
            half = bf16_above(step.clamp(SMALLEST, LARGEST_BF16))
            bottom = lowest_level(low * from_bf16(half).reciprocal(), drawn) / self.unit
        scale = torch.where(half == 0, 0.0, from_bf16(half).reciprocal()).masked_fill(broken, NAN)
        return half.masked_fill(broken, NAN_STEP) | bottom.masked_fill(broken, 0).int() << 16, scale

    def encode(self, x: Tensor, header: Tensor, scale: Tensor, draw: Tensor | None) -> Tensor:
        top = (1 << self.bits) - 1
        if self.bits == 1 and draw is None:
            return ((x >= 0) & (scale == scale)).to(torch.uint8)
        if self.about_zero(draw is not None):
            return quantize(x * scale + top / 2, 0.0, scale, draw, top)
        return quantize(x * scale, self._bottom(header), scale, draw, top)

    def decode(self, codes: Tensor, header: Tensor) -> Tensor:
        return dequantize(codes, from_bf16(header), self._bottom(header))

    def _bottom(self, header: Tensor) -> Tensor:
        return (header >> 16).float() * self.unit

    def device(self) -> Mapping[str, Any]:
        from . import uniform_gpu

        return uniform_gpu.DEVICE


def mean_magnitude(x: Tensor) -> Tensor:
    """Return the mean |x| of each block (…, width), as (…, 1); NaN where one of its values is not finite."""
    size = x.abs()
    top = size.amax(-1, keepdim=True)
    broken = top - top != 0  # amax passes NaN on
    field = (top.view(torch.int32) >> 23).clamp(FIELD, 254)
    unit, units = ((f << 23).view(torch.float32) for f in (field + 1 - DIGITS, 253 + DIGITS - field))
    total = (size * units).int().sum(-1, keepdim=True, dtype=torch.int32)
    return (total.float() / x.new_full((1,), x.shape[-1]) * unit).masked_fill(broken, NAN)


def bf16_above(x: Tensor) -> Tensor:
    """Return the bits of the bf16 that is next, away from zero; bf16 is the upper half of fp32."""
    return (x.view(torch.int32) + 0xFFFF) >> 16


def from_bf16(half: Tensor) -> Tensor:
    """Return as fp32 the bf16 whose bits are the lower half of an int32."""
    return (half << 16).view(torch.float32)


OPERATORS = {(8, False): minmax_uint8.OPERATORS}  # by bits, and whether blocks are rotated; filled when first needed


def operators_of(bits: int, rotated: bool) -> Operators:
    """Return the operators of the format of so many bits."""
    found = OPERATORS.get((bits, rotated))
    if found is None:
        found = OPERATORS.setdefault((bits, rotated), operators(UniformFormat(bits, rotated)))
    return found
