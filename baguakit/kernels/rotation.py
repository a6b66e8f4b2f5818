"""A randomised Hadamard transform of blocks, which spreads every value over all places of its block.

    rotated = H D x / 2ᵐ⁺¹       blocks of 2ᵐ values; D = diag(±1), the same for all blocks, ranks and rounds
    x       = 2 D H rotated

Whatever the values were, of a rotated block each is a mean of all with random signs, and so nearly normal: few are far
from the others, which is what a grid needs. H D / √2ᵐ is orthonormal, so that an error keeps its size. The signs follow
from the place alone (`noise.py`, key 0): ranks add rotated blocks, and whoever reads them needs no key.

H is applied in m steps, step d = 0, 1, … m − 1 to the pairs of places that differ by 2ᵈ: (a, b) → (a + b, a − b). The
factors are powers of two; those less than one come before the first step, both ways, so that no sum overflows on its
way and none is NaN: only in the last product, with 2ᵐ⁺¹, can a finite value become infinite, where it was within what
its block loses of the largest fp32. `gpu.py` does the same.
"""

from functools import lru_cache

import torch
from torch import Tensor

from . import noise

STEPS = 3  # taken at once: 2³ parts fit the registers of a CPU; with more, they also take long to compile


@lru_cache(maxsize=64)
def signs_of(width: int, device: torch.device) -> Tensor:
    """Return D of blocks of `width` values, as ±1 in fp32."""
    seed = torch.tensor(noise.seed_words(0), device="cpu")
    # Made on the CPU and copied: the copy has ended when this returns, whichever stream reads it next.
    negative = noise.uniform(torch.arange(width), seed) >= 0.5
    return (1 - 2 * negative.float()).to(device)


def rotate(x: Tensor, signs: Tensor) -> Tensor:
    """Return blocks (…, width) of fp32 rotated, given the signs of their width."""
    return _transformed(x * (signs * (0.5 / x.shape[-1])))


def restore(x: Tensor, signs: Tensor) -> Tensor:
    """Return what `rotate` was given, up to rounding."""
    return _transformed(x * (1 / x.shape[-1])) * (signs * (2 * x.shape[-1]))


def _transformed(x: Tensor) -> Tensor:
    """Return H x. Blocks become columns, so that all additions are of neighbours, and back."""
    blocks = x.reshape(-1, x.shape[-1])
    columns = in_memory(blocks.t())
    left = x.shape[-1].bit_length() - 1
    while left:
        steps = min(left, STEPS)
        left -= steps
        parts = columns.view(1 << left, 1 << steps, -1).unbind(1)
        for distance in (1 << step for step in range(steps)):
            parts = tuple(
                parts[i - distance] - part if i & distance else part + parts[i + distance]
                for i, part in enumerate(parts)
            )
        columns = torch.stack(parts, 1)
    return in_memory(columns.view(blocks.shape[::-1]).t()).view(x.shape)


def in_memory(x: Tensor) -> Tensor:
    """Return a contiguous tensor, which Inductor writes to memory, and does not compute anew for each use."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())
