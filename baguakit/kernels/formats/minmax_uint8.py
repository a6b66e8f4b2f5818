"""Min-max quantization: each block of values becomes one byte a value, on a grid of 256 levels that holds zero.

    step   = (high / 2 − low / 2) / 127.5            halves, so that no finite block overflows
    bottom = ⌊low · (1 / step) + ½⌋
    code   = ⌊x · (1 / step) + ½⌋ − bottom           clamped to 0 … 255
    x′     = (code + bottom) · step                  |x′ − x| ≤ (high − low) / 510 + a few ulps of the largest |x|

Every level is an integer times the step, so zero survives exactly. Three kinds of block have a step of their own:
equal values, which take that value (code 0, bottom 1: exact); a block so narrow that its step would be subnormal,
which takes 2⁻¹²⁶, the smallest normal number, so that devices that flush subnormals read the same (its error is at
most 2⁻¹²⁷); and one that holds a NaN or an infinity, which takes the NaN 0x7fc00000, bottom and codes 0, and reads as
NaN throughout. The grid reaches half a step past the block: only values within 0.4 % of the largest fp32 can read as
infinite, and no finite block as NaN.

Rounding by draws is unbiased: step = (high / 2 − low / 2) / 127 and bottom = ⌊low / step⌋, so that both neighbours of
each value are levels, and the upper one is taken with probability x / step − ⌊x / step⌋.

A block is headed by (step, bottom) as fp32: 8.125 bits a value in blocks of 512.

This file is the definition; `minmax_uint8_gpu.py` holds the same arithmetic for GPUs, and `minmax_uint8_numpy.py`
for few values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..blockwise.format import Arithmetic, Format
from ..blockwise.operators import operators
from . import minmax_uint8_numpy as in_numpy

SMALLEST = 2.0**-126
NAN = float("nan")


@dataclass(frozen=True, eq=False)
class MinMaxUInt8Format(Format):
    """The format of this file."""

    bits = 8
    header = (torch.float32, 2)
    name = "minmax_uint8"
    arrays = Arithmetic(in_numpy.measure, in_numpy.encode, in_numpy.decode)

    def measure(self, x: Tensor, drawn: bool) -> tuple[Tensor, Tensor]:
        intervals = 254.0 if drawn else 255.0
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        spread = high * 0.5 - low * 0.5
        broken = spread - spread != 0  # amin and amax pass NaN on
        equal = (low == high) & (high != 0)
        step = torch.where(equal, high, (spread / x.new_full((1,), intervals / 2)).clamp(min=SMALLEST))
        scale = torch.where(equal, 0.0, step.reciprocal()).masked_fill(broken, NAN)
        bottom = torch.where(equal, 1.0, lowest_level(low * scale, drawn))
        return torch.cat([step.masked_fill(broken, NAN), bottom.masked_fill(broken, 0)], -1), scale

    def encode(self, x: Tensor, header: Tensor, scale: Tensor, draw: Tensor | None) -> Tensor:
        return quantize(x * scale, header[..., 1:], scale, draw, 255)

    def decode(self, codes: Tensor, header: Tensor) -> Tensor:
        return dequantize(codes, header[..., :1], header[..., 1:])

    def device(self) -> Mapping[str, Any]:
        from . import minmax_uint8_gpu

        return minmax_uint8_gpu.DEVICE


def lowest_level(low: Tensor, drawn: bool) -> Tensor:
    """Return the level of the lowest value, given in steps: the next below if rounding is drawn, else the nearest."""
    low = torch.where(low.abs() < SMALLEST, 0.0, low)  # a GPU's floor takes subnormals for zero
    return (low + (0.0 if drawn else 0.5)).floor()


def quantize(level: Tensor, bottom: Tensor | float, scale: Tensor, draw: Tensor | None, top: int) -> Tensor:
    """Return the code, 0 … top, of each value, given in steps, from the level `bottom`; 0 where the scale is NaN."""
    if draw is None:
        level = (level + 0.5).floor()
    else:
        below = level.floor()
        level = below + (level - below > draw).float()
    codes = (level - bottom).clamp(0, top)
    return torch.where(scale == scale, codes, 0.0).to(torch.uint8)  # what a NaN becomes in uint8 is undefined


def dequantize(codes: Tensor, step: Tensor, bottom: Tensor) -> Tensor:
    """Return the value of each code."""
    return (codes.float() + bottom) * step


OPERATORS = operators(MinMaxUInt8Format())
