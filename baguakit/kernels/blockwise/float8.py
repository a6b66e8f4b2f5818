"""Eight bits per value: a float8 number, and a power of two s for each block.

    s    = the smallest power of two with max |x| / s ≤ largest, within the bounds below
    code = float8(x / s)                             to the nearest, ties to even; clamped to ± largest
    x′   = s · the number of the code                |x′ − x| ≤ max(|x| / 2ᵐ⁺¹, s · 2ᵉ⁻ᵐ / 2)

    format   m   e     largest          smallest, 2ᵉ⁻ᵐ         m: bits of the mantissa; 2ᵉ: smallest normal number
    e4m3     3   −6    448 = 1.75·2⁸    2⁻⁹                    (torch.float8_e4m3fn)
    e5m2     2   −14   57344 = 1.75·2¹⁵ 2⁻¹⁶                   (torch.float8_e5m2)

Division by a power of two is exact, so only the cast rounds. s takes one byte, the exponent of s · 2¹²⁷ (E8M0 of the
OCP Microscaling Formats, v1.0, 2023): 8.0625 bits a value in blocks of 128. A format spans 18 (e5m2: 32) powers of two.
As s is a power of two, a block may leave the highest of them unused, but keeps full precision. Zeros keep their
sign. s is at least 2ᵐ⁻ᵉ⁻¹²⁶, so that every x′ but zero is a normal number, and devices that flush subnormals decode the
same. s is at most 2¹¹⁹ (e5m2: 2¹¹²), so that finite values decode to finite values; magnitudes above 1.75 · 2¹²⁷ decode
to 1.75 · 2¹²⁷. A block with a NaN or an infinity has the byte 255 and codes 0, and all its values decode to NaN.

Random rounding is unbiased: if |x| / s is between adjacent float8 numbers a < b, it becomes b with the probability
(|x| / s − a) / (b − a).

This file is the definition, with torch's casts. `float8_gpu.py` and `cpu.c` compute the same codes with integers,
because casts on older GPUs and in Triton's interpreter differ from torch's:

    f    = max(exponent of |x / s| − e + 1, 1)       the exponent field of the code
    k    = |x / s| · 2ᵐ⁻ᵉ⁻ᶠ⁺¹, rounded               2ᵐ ≤ k ≤ 2ᵐ⁺¹, or less if f = 1
    code = (f − 1) · 2ᵐ + k, with the sign of x      k = 2ᵐ⁺¹ gives the next power of two
"""

import torch
from torch import Tensor

from .format import Format

BIAS = 127  # of an exponent's field in fp32
NAN_FIELD = 255
MANTISSA = 0x600000  # of 1.75, that of the largest number in both formats


class Float8Format(Format):
    """A format of this file, with `m` bits of mantissa; `e` is the exponent of the smallest normal number."""

    bits = 8
    header = (torch.uint8, 1)

    def __init__(self, dtype: torch.dtype, m: int, e: int) -> None:
        super().__init__(f"float8_e{7 - m}m{m}")
        self.dtype, self.m, self.e = dtype, m, e
        self.exponent = round(torch.finfo(dtype).max / 1.75).bit_length() - 1  # of the largest number
        # The bounds of the exponent field of s: 2ᵉ⁻ᵐ · s must be normal, and the largest number times s finite.
        self.fields = 1 + m - e, BIAS + 127 - self.exponent
        self.numbers = m, e, (self.exponent - e + 1 << m) + 3 * (1 << m) // 4  # the code of the largest number

    def measure(self, x: Tensor, drawn: bool) -> tuple[Tensor, Tensor]:
        top = x.abs().amax(-1, keepdim=True)
        broken = top - top != 0  # amax passes NaN on
        field = ((top.view(torch.int32) + 0x7FFFFF - MANTISSA) >> 23) - self.exponent
        field = field.clamp(*self.fields)
        scale = ((2 * BIAS - field) << 23).view(torch.float32)
        return field.masked_fill(broken, NAN_FIELD).to(torch.uint8), scale.masked_fill(broken, float("nan"))

    def encode(self, x: Tensor, header: Tensor, scale: Tensor, draw: Tensor | None) -> Tensor:
        largest = torch.finfo(self.dtype).max
        y = (x * scale).clamp(-largest, largest)
        y = torch.where(scale == scale, y, 0.0)
        if draw is not None:
            field = ((y.view(torch.int32) >> 23) & 0xFF).clamp(min=BIAS + self.e)
            unit = ((field - self.m) << 23).view(torch.float32)  # the distance of the neighbours
            level = y.abs() / unit
            below = level.floor()
            y = torch.copysign((below + (level - below > draw).float()) * unit, y)
        return y.to(self.dtype).view(torch.uint8)

    def decode(self, codes: Tensor, header: Tensor) -> Tensor:
        s = (header.int() << 23).view(torch.float32)
        s = torch.where(header == NAN_FIELD, float("nan"), s)
        return codes.view(self.dtype).float() * s


E4M3 = Float8Format(torch.float8_e4m3fn, m=3, e=-6)
E5M2 = Float8Format(torch.float8_e5m2, m=2, e=-14)
