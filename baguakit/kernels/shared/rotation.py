"""A randomised Hadamard transform of blocks, which spreads every value over all places of its block.

    rotated = H D x / 2ᵐ⁺¹       blocks of 2ᵐ values; D = diag(±1), the same for all blocks, ranks and rounds
    x       = 2 D H rotated

Whatever the values were, of a rotated block each is a mean of all with random signs, and so nearly normal: few are far
from the others, which is what a grid needs. H D / √2ᵐ is orthonormal, so that an error keeps its size. The signs follow
from the place alone (`noise.py`, key 0): ranks add rotated blocks, and whoever reads them needs no key.

H is applied in m steps, step d = 0, 1, … m − 1 to the pairs of places that differ by 2ᵈ: (a, b) → (a + b, a − b). The
factors are powers of two; those less than one come before the first step, both ways, so that no sum overflows on its
way and none is NaN: only in the last product, with 2ᵐ⁺¹, can a finite value become infinite, where it was within what
its block loses of the largest fp32. `rotation_gpu.py` does the same.
"""

from functools import lru_cache
from threading import get_ident

import torch
from torch import Tensor

from . import noise

PIECE = 1 << 16  # values that are rotated at once: they stay in the cache


def rotate(x: Tensor) -> Tensor:
    """Return blocks (…, width) of fp32 rotated."""
    signs = signs_of(x.shape[-1], x.device)
    return _transformed(x, signs / (2 * x.shape[-1]), None)


def restore(x: Tensor) -> Tensor:
    """Return what `rotate` was given, up to rounding."""
    width = x.shape[-1]
    return _transformed(x, x.new_full((), 1 / width), signs_of(width, x.device) * (2 * width))


@lru_cache(maxsize=64)
def signs_of(width: int, device: torch.device) -> Tensor:
    """Return D of blocks of `width` values, as ±1 in fp32."""
    place = torch.arange(width, device=device)
    one = torch.ones((), dtype=torch.float32, device=device)
    return torch.where(noise.uniform(place, noise.start_and_seed(0, 0, device)[1:]) < 0.5, one, -one)


class Columns:
    """Memory for blocks whose values lie in columns, so that all additions are of neighbours; and each step's views."""

    def __init__(self, width: int, count: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # else it could not be overwritten outside of it
            columns, other = torch.empty(2, width, count, dtype=torch.float32, device=device).unbind()
        self.given, self.columns = other.view(count, width), columns
        self.steps: list[tuple[Tensor, ...]] = []
        for distance in (1 << step for step in range(width.bit_length() - 1)):
            shape = (width // (2 * distance), 2, distance * count)
            self.steps.append((*columns.view(shape).unbind(1), *other.view(shape).unbind(1)))
            columns, other = other, columns
        self.made = columns.t()

    def transformed(self, blocks: Tensor, before: Tensor) -> Tensor:
        """Return H (blocks · before), which stays until the next call."""
        torch.mul(blocks, before, out=self.given)
        self.columns.copy_(self.given.t())
        for a, b, sums, differences in self.steps:
            torch.add(a, b, out=sums)
            torch.sub(a, b, out=differences)
        return self.made


@lru_cache(maxsize=16)
def kept(width: int, device: torch.device, thread: int) -> Columns:
    """Return the memory of a thread for whole pieces: to make its views would take as long as to add."""
    return Columns(width, max(PIECE // width, 1), device)


def _transformed(x: Tensor, before: Tensor, after: Tensor | None) -> Tensor:
    """Return H (x · before) · after, piece by piece."""
    width = x.shape[-1]
    blocks, out, most = x.reshape(-1, width), x.new_empty(x.shape), max(PIECE // width, 1)
    for given, made in zip(blocks.split(most), out.view(-1, width).split(most), strict=True):
        whole = len(given) == most
        columns = kept(width, x.device, get_ident()) if whole else Columns(width, len(given), x.device)
        values = columns.transformed(given, before)
        made.copy_(values) if after is None else torch.mul(values, after, out=made)
    return out
