"""Formats of others, as their documents define them: the values that tensors read as, and the bits that they take.

MX: Open Compute Project 2023, "OCP Microscaling Formats (MX) Specification", version 1.0. Blocks of 32 elements share a
scale X, a power of two (E8M0):

    X = 2^(⌊log2 max |v|⌋ − e)          e: exponent of the largest element; of X's, −127 to 127
    p = element nearest to v / X        ties to even; past the largest element, the largest
    v′ = p X

NVFP4: NVIDIA 2025, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, appendix C. Blocks of 16 elements
E2M1 share a scale in E4M3, and all blocks a scale g in fp32:

    g = max |v| of the tensor / (6 · 448)
    s = E4M3 nearest to max |v| of the block / (6 g)
    p = E2M1 nearest to v / (s g)       ties to even; past 6, 6
    v′ = p s g                          0 where s is 0
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

MX_BLOCK, NV_BLOCK = 32, 16
SCALE_BITS = 8  # of a block in both
LEAST, GREATEST = -127, 127  # exponents of E8M0


@dataclass(frozen=True)
class Element:
    """Numbers of so many `bits`: m of mantissa, exponents from `low` on, of which subnormals have the least.

    Attributes:
        low: exponent of the least normal number.
        largest: the largest number.
    """

    bits: int
    m: int
    low: int
    largest: float

    @property
    def high(self) -> int:
        """Return the exponent of the largest number."""
        return int(torch.tensor(self.largest).frexp().exponent) - 1

    def nearest(self, x: Tensor) -> Tensor:
        """Return the nearest numbers, ties to even; past the largest one, that."""
        step = torch.exp2((x.frexp().exponent - 1).clamp(min=self.low) - self.m)
        return ((x / step).round() * step).clamp(-self.largest, self.largest)


E4M3, E5M2 = Element(8, 3, -6, 448.0), Element(8, 2, -14, 57344.0)
E3M2, E2M3 = Element(6, 2, -2, 28.0), Element(6, 3, 0, 7.5)
E2M1 = Element(4, 1, 0, 6.0)
INT8 = Element(8, 6, 0, 127 / 64)  # two's complement in 64ths; the largest negative one is not used, to be symmetric


def mx(element: Element, x: Tensor) -> Tensor:
    """Return the values (n,) in fp32 that `x` reads as in an MX format."""
    blocks = _blocks(x, MX_BLOCK)
    top = blocks.abs().amax(1, keepdim=True)
    scale = torch.exp2((top.frexp().exponent - 1.0 - element.high).clamp(LEAST, GREATEST))
    return (element.nearest(blocks / scale) * scale).flatten()[: len(x)]


def nvfp4(x: Tensor) -> Tensor:
    """Return the values (n,) in fp32 that `x` reads as in NVFP4."""
    blocks = _blocks(x, NV_BLOCK)
    top = blocks.abs().amax(1, keepdim=True)
    g = top.max() / (E2M1.largest * E4M3.largest)
    if g == 0:
        return torch.zeros_like(x)
    scale = E4M3.nearest(top / E2M1.largest / g) * g
    return torch.where(scale == 0, scale, E2M1.nearest(blocks / scale) * scale).flatten()[: len(x)]


def _blocks(x: Tensor, block: int) -> Tensor:
    return pad(x, (0, -len(x) % block)).view(-1, block)
