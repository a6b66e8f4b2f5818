"""One to eight bits per value: each block has a uniform grid of 2ᵇ levels, for b bits.

    top    = 2ᵇ − 1                                  low and high: minimum and maximum of a block's values x
    step   = (high / 2 − low / 2) / (top / 2)        at least 2⁻¹²⁶; the halves keep finite blocks from overflow
    bottom = ⌊low · (1 / step) + ½⌋
    code   = ⌊x · (1 / step) + ½⌋ − bottom           clamped to 0 … top
    x′     = (code + bottom) · step                  |x′ − x| ≤ step / 2 + a few ulps of the largest |x|

Every level is an integer times the step, so zero is exact. The smallest step is the smallest normal number, so that
devices that flush subnormals decode the same. A block with a NaN or an infinity has the step 0x7fc00000, bottom and
codes 0, and all its values decode to NaN. The grid extends up to half a step beyond high: only values within 0.4 %
(4 % for four bits) of the largest fp32 can decode to infinity, and no finite block decodes to NaN.

Random rounding is unbiased. It divides high − low by top − 1, and bottom is ⌊low / step⌋, so that both neighbours of
each value are levels. The upper neighbour is taken with probability x / step − ⌊x / step⌋.

Eight bits without rotation have a *wide* header, (step, bottom) as two fp32: 8.125 bits a value in blocks of 512. A
block of equal values has that value as its step, with code 0 and bottom 1, and is exact. All other formats have a
narrow header: step in bf16 and bottom in int16, as the halves of an int32:

    step   = max(step above, max |x| / reach)        rounded up to bf16; at most the largest bf16

With few bits the size of the header matters: four-bit codes take 4.125 bits a value in blocks of 256; with two fp32
they would take 4.25. Rounding makes the step larger by a factor of at most 1 + 2⁻⁷, which costs less accuracy than
larger blocks would. So the error of four bits is at most 1.008 times (high − low) / 30. If a block is narrow and far
from zero, the bound is 1.008 times max |x| / 65520, because bottom must be an int16 (reach = 32760). Only with two bits
and random rounding, where a step is half of high − low, could a step exceed the largest bf16.

Rotated blocks (`rotation.py`) are nearly normal. With few bits, a grid up to the largest values would waste levels. So
with up to three bits rounded to nearest, and with one bit always, the grid is centred at zero:

    step   = spacing · mean |x|                      rounded up to bf16; random: 2 · max |x|; 0 if all values are 0
    bottom = −top / 2
    code   = 2ᵇ⁻¹ + m if x ≥ 0, else 2ᵇ⁻¹ − 1 − m    m = how many of 1 … 2ᵇ⁻¹ − 1 times the step |x| reaches;
                                                     random: a neighbour of x / step − bottom

where spacing = Δ √(π / 2), and Δ is the step of least error for normal values of variance 1 (Max 1960, "Quantizing for
minimum distortion": 1.596, 0.9957 and 0.5860 for one to three bits, with errors 0.363, 0.119 and 0.0374). One bit gives
the sign times the mean magnitude, which is the best single magnitude: ‖x′ − x‖² = ‖x‖² − ‖x‖₁² / width, except for the
rounding of the step. With rotation, and with one bit, the header counts bottom in halves of a step, and reach is 16380.
The mean sums at most 8192 integers of 17 bits, so that the order of summation does not matter:

    mean |x| = Σ ⌊|x| / u⌋ / width · u               u = 2⁻¹⁷ of the least power of two above max |x|, at least 2⁻¹¹³,
                                                     so that there are no subnormals

This file is the definition; `uniform_gpu.py` has the same arithmetic for GPUs, and `cpu.c` for CPUs.
"""

import torch
from torch import Tensor

from .format import Format

SMALLEST = 2.0**-126
NAN = float("nan")
REACH = 32760.0  # how many halves of a step, or steps, from zero a value may be
LARGEST = 2.0**127  # step about zero
LARGEST_BF16 = torch.finfo(torch.bfloat16).max
FIELD = 30  # the least field of an exponent that max |x| is taken to have: u is 2⁻¹¹³, and u / 8192 is normal
DIGITS = 17  # of the integers that are summed: 8192 of them fit 31 bits
SPACINGS = {1: 2.0, 2: 1.2479, 3: 0.7344}  # of levels about zero, in mean magnitudes


class UniformFormat(Format):
    """The format of this file, with `bits` bits per value."""

    def __init__(self, bits: int, rotated: bool = False) -> None:
        self.bits, self.rotated = bits, rotated
        self.wide = bits == 8 and not rotated  # a header is two fp32
        super().__init__("minmax_uint8" if self.wide else f"uint{bits}" + "_rotated" * rotated)
        self.header = (torch.float32, 2) if self.wide else (torch.int32, 1)
        self.padded = rotated or bits not in (1, 2, 4, 8)
        self.unit = 0.5 if rotated or bits == 1 else 1.0  # of bottoms, in steps

    def about_zero(self, drawn: bool) -> bool:
        """Return whether grids are centred at zero; otherwise they span the block from its minimum to its maximum."""
        return self.bits == 1 or (self.rotated and not drawn and self.bits in SPACINGS)

    def measure(self, x: Tensor, drawn: bool) -> tuple[Tensor, Tensor]:
        top = (1 << self.bits) - 1
        if self.about_zero(drawn):
            size = x.abs().amax(-1, keepdim=True) if drawn else mean_magnitude(x)
            broken, zero = size - size != 0, size == 0  # amax passes NaN on, here and below
            step = bf16_above((size * (2.0 if drawn else SPACINGS[self.bits])).clamp(SMALLEST, LARGEST))
            scale, step = torch.where(zero, 0.0, step.reciprocal()), torch.where(zero, 0.0, step)
            bottom = torch.full_like(size, -top)
        else:
            low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
            spread = high * 0.5 - low * 0.5
            broken = spread - spread != 0
            step = spread / x.new_full((1,), (top - drawn) / 2)
            if self.wide:
                step = step.clamp(min=SMALLEST)
            else:
                reach = torch.maximum(low.abs(), high.abs()) / x.new_full((1,), REACH * self.unit)
                step = bf16_above(torch.maximum(reach, step).clamp(SMALLEST, LARGEST_BF16))
            scale = step.reciprocal()
            level = torch.where((low * scale).abs() < SMALLEST, 0.0, low * scale)  # a GPU's floor flushes subnormals
            bottom = (level + (0.0 if drawn else 0.5)).floor() / self.unit
            if self.wide:
                equal = (low == high) & (high != 0)
                step, scale = torch.where(equal, high, step), torch.where(equal, 0.0, scale)
                bottom = torch.where(equal, 1.0, bottom)
        step, bottom = step.masked_fill(broken, NAN), bottom.masked_fill(broken, 0)
        header = torch.cat([step, bottom], -1) if self.wide else step.view(torch.int32) >> 16 | bottom.int() << 16
        return header, scale.masked_fill(broken, NAN)

    def encode(self, x: Tensor, header: Tensor, scale: Tensor, draw: Tensor | None) -> Tensor:
        top = (1 << self.bits) - 1
        if draw is None and self.about_zero(False):
            half, size, step = 1 << self.bits - 1, x.abs(), self._parts(header)[0]
            above = half + sum((size >= k * step).int() for k in range(1, half))
            return (torch.where(x >= 0, above, top - above) * (step == step)).to(torch.uint8)
        level = x * scale
        if draw is None:
            level = (level + 0.5).floor()
        else:
            level = level + top / 2 if self.about_zero(True) else level
            below = level.floor()
            level = below + (level - below > draw).float()
        if not self.about_zero(draw is not None):
            level = level - self._parts(header)[1]
        # The conversion of a NaN to uint8 is undefined.
        return torch.where(scale == scale, level.clamp(0, top), 0.0).to(torch.uint8)

    def decode(self, codes: Tensor, header: Tensor) -> Tensor:
        step, bottom = self._parts(header)
        return (codes.float() + bottom) * step

    def _parts(self, header: Tensor) -> tuple[Tensor, Tensor]:
        """Return (steps, bottoms) of headers, both (…, 1) and in fp32."""
        if self.wide:
            return header[..., :1], header[..., 1:]
        return (header << 16).view(torch.float32), (header >> 16).float() * self.unit


def mean_magnitude(x: Tensor) -> Tensor:
    """Return the mean |x| of each block (…, width), as (…, 1); NaN if a value of the block is not finite."""
    size = x.abs()
    top = size.amax(-1, keepdim=True)
    broken = top - top != 0  # amax passes NaN on
    field = (top.view(torch.int32) >> 23).clamp(FIELD, 254)
    unit, units = ((f << 23).view(torch.float32) for f in (field + 1 - DIGITS, 253 + DIGITS - field))
    total = (size * units).int().sum(-1, keepdim=True, dtype=torch.int32)
    return (total.float() / x.new_full((1,), x.shape[-1]) * unit).masked_fill(broken, NAN)


def bf16_above(x: Tensor) -> Tensor:
    """Return `x` rounded away from zero to bf16, but in fp32: its lower 16 bits are zero."""
    return ((x.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)


GRIDS = {(bits, rotated): UniformFormat(bits, rotated) for bits in range(1, 9) for rotated in (False, True)}
