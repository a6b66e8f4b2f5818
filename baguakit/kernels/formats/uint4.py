"""Four bits a value: each block on a grid of 16 levels that holds zero, and headed by four bytes.

    step   = max((high / 2 − low / 2) / 7.5, max |x| / 32760, 2⁻¹²⁶), rounded up to bf16
    bottom = ⌊low · (1 / step) + ½⌋                  an int16
    code   = ⌊x · (1 / step) + ½⌋ − bottom           clamped to 0 … 15
    x′     = (code + bottom) · step                  |x′ − x| ≤ step / 2 + a few ulps of the largest |x|

Every level is an integer times the step, so zero survives exactly. At four bits the header weighs: (step, bottom) as
the halves of an int32 take 4.125 bits a value in blocks of 256, where two fp32 would take 4.25, and a step that is at
most 2⁻⁷ wider costs less than the larger blocks that would make up for it. So the error is at most 1.008 times
(high − low) / 30; where a block is narrow and far from zero, 1.008 times max |x| / 65520, for bottom must be an int16;
and where its values are tiny, 2⁻¹²⁷. A block that holds a NaN or an infinity takes the step 0x7fc0, bottom and codes
0, and reads as NaN throughout. The grid reaches half a step past the block: only values within 4 % of the largest
fp32 can read as infinite, and no finite block as NaN.

Rounding by draws is unbiased: the range is divided by 7 and bottom is ⌊low / step⌋, so that both neighbours of each
value are levels, and the upper one is taken with probability x / step − ⌊x / step⌋.

This file is the definition; `uint4_gpu.py` holds the same arithmetic for GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..blockwise.format import Format
from ..blockwise.operators import operators
from .minmax_uint8 import NAN, SMALLEST, dequantize, lowest_level, quantize

LEVELS = 32760.0  # how many steps from zero a value may be
NAN_STEP = 0x7FC0  # in bf16


@dataclass(frozen=True)
class UInt4(Format):
    """The format of this file."""

    bits = 4
    header = (torch.int32, 1)
    name = "uint4"

    def measure(self, x: Tensor, drawn: bool) -> tuple[Tensor, Tensor]:
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        spread = high * 0.5 - low * 0.5
        broken = spread - spread != 0  # amin and amax pass NaN on
        reach = torch.maximum(low.abs(), high.abs()) / x.new_full((1,), LEVELS)
        reach = torch.maximum(reach, spread / x.new_full((1,), 7.0 if drawn else 7.5)).clamp(min=SMALLEST)
        half = (reach.view(torch.int32) + 0xFFFF) >> 16  # bf16 is the upper half of fp32
        scale = (half << 16).view(torch.float32).reciprocal().masked_fill(broken, NAN)
        bottom = lowest_level(low * scale, drawn).masked_fill(broken, 0)
        return half.masked_fill(broken, NAN_STEP) | bottom.int() << 16, scale

    def encode(self, x: Tensor, header: Tensor, scale: Tensor, draw: Tensor | None) -> Tensor:
        return quantize(x, (header >> 16).float(), scale, draw, 15)

    def decode(self, codes: Tensor, header: Tensor) -> Tensor:
        return dequantize(codes, (header << 16).view(torch.float32), (header >> 16).float())

    def device(self) -> Mapping[str, Any]:
        from . import uint4_gpu

        return uint4_gpu.DEVICE


OPERATORS = operators(UInt4())
