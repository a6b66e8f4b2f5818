"""One bit a value: its sign, and for each block the mean of its magnitudes.

    s    = Σ ⌊|x| / u⌋ / width · u                   u = 2⁻¹⁷ of the least power of two above max |x|
    code = 1 if x < 0 else 0
    x′   = −s if code else s

The mean of the magnitudes is the s that brings x′ nearest to x, ‖x′ − x‖² = ‖x‖² − ‖x‖₁² / width, which makes this the
compressor of EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847): use it with error feedback. Integers are summed,
at most 8192 of 17 bits, so that their order cannot matter and every device finds the same s: below the mean of |x| by
at most u. Zeros count as positive, as in the literature: one bit has no third value. Only where a whole block is zero
does it read as zero. u is at least 2⁻¹¹³, so that s is zero or normal, which devices that flush subnormals read the
same; magnitudes below that count as zero. A block that holds a NaN or an infinity takes the NaN 0x7fc00000 and codes
0, and reads as NaN throughout; no other reads as anything but finite.

A block is headed by s as fp32: 1.03125 bits a value in blocks of 1024.

This file is the definition; `sign_gpu.py` holds the same arithmetic for GPUs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..blockwise.format import Format
from ..blockwise.operators import operators

FIELD = 30  # the least field of an exponent that max |x| is taken to have: u is 2⁻¹¹³, and u / 8192 is normal
DIGITS = 17  # of the integers that are summed: 8192 of them fit 31 bits


@dataclass(frozen=True, eq=False)
class SignFormat(Format):
    """The format of this file."""

    bits = 1
    header = (torch.float32, 1)
    name = "sign"

    def measure(self, x: Tensor, drawn: bool) -> tuple[Tensor, Tensor]:
        s = mean_magnitude(x)
        return s, s

    def encode(self, x: Tensor, header: Tensor, scale: Tensor, draw: Tensor | None) -> Tensor:
        return ((x < 0) & (scale == scale)).to(torch.uint8)

    def decode(self, codes: Tensor, header: Tensor) -> Tensor:
        return torch.where(codes != 0, -header, header)

    def device(self) -> Mapping[str, Any]:
        from . import sign_gpu

        return sign_gpu.DEVICE


def mean_magnitude(x: Tensor) -> Tensor:
    """Return s of each block (…, width), as (…, 1); NaN where one of its values is not finite."""
    size = x.abs()
    top = size.amax(-1, keepdim=True)
    broken = top - top != 0  # amax passes NaN on
    field = (top.view(torch.int32) >> 23).clamp(FIELD, 254)
    unit, units = ((f << 23).view(torch.float32) for f in (field + 1 - DIGITS, 253 + DIGITS - field))
    total = (size * units).int().sum(-1, keepdim=True, dtype=torch.int32)
    s = total.float() / x.new_full((1,), x.shape[-1]) * unit
    return s.masked_fill(broken, float("nan"))


OPERATORS = operators(SignFormat())
