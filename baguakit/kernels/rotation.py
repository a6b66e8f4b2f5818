"""A randomised Hadamard transform of blocks, which spreads every value over all positions of its block.

    rotated = H D x / 2ᵐ⁺¹       x: a block of 2ᵐ values; H: the Hadamard matrix of this size; D = diag(±1),
    x       = 2 D H rotated      which is the same for all blocks, ranks and rounds

A rotated value is half the mean of all values of the block with random signs. So rotated values are nearly normal for
any distribution, and few are outliers, which suits a uniform grid. H D / √2ᵐ is orthonormal, so that the norm of an
error, relative to that of x, does not change. The signs depend only on the position (`noise.py`, key 0), so that ranks
can add rotated blocks, and decoding needs no key.

H is applied in m steps. Step d = 0, 1, … m − 1 replaces two values a and b that are 2ᵈ positions apart by a + b and
a − b. The factors are powers of two. In both directions a factor below one comes before the first step, so that no sum
overflows or becomes NaN. Only the last product, with 2ᵐ⁺¹, can make a finite value infinite, and only a value that
differs from the largest fp32 by less than the error of its block. `gpu.py` and `blockwise/cpu.c` do the same.
"""

from functools import lru_cache

import torch
from torch import Tensor

from . import noise


@lru_cache(maxsize=64)
def signs_of(width: int, device: torch.device) -> Tensor:
    """Return the diagonal of D for blocks of `width` values: ±1 in fp32."""
    seed = torch.tensor(noise.seed_words(0), device="cpu")
    # The signs are made on the CPU: the copy is then complete when `.to` returns, so that any stream may read it.
    negative = noise.uniform(torch.arange(width), seed) >= 0.5
    return (1 - 2 * negative.float()).to(device)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """Return fp32 blocks (…, width) rotated, given the signs for this width."""
    return _transformed(x * (signs * (0.5 / x.shape[-1])))


def restore(x: Tensor, signs: Tensor) -> Tensor:
    """Return the inverse of `rotate`, up to rounding."""
    return _transformed(x * (1 / x.shape[-1])) * (signs * (2 * x.shape[-1]))


def _transformed(x: Tensor) -> Tensor:
    """Return H x for each block (…, width)."""
    for step in range(x.shape[-1].bit_length() - 1):
        a, b = x.unflatten(-1, (-1, 2, 1 << step)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
    return x
