"""Functions that kernels share: random numbers (`noise.py`), rotation (`rotation.py`), loads, stores, and launches.

In all kernels, an argument in capitals is a compile-time constant.
"""

import contextlib
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


def tiled(n: int, tile: int) -> list[tuple[int, int, bool]]:
    """Return (first tile, number of tiles, masked) of each launch over n values: full tiles, then a partial one."""
    whole, rest = divmod(n, tile)
    return [(0, whole, False)] * (whole > 0) + [(whole, 1, True)] * (rest > 0)


def launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument, current or not. If `programs` is 0, do nothing."""
    if programs:
        device = arguments[0].device
        there = device.type != "cuda" or device.index == torch.cuda.current_device()  # as on a lane
        with contextlib.nullcontext() if there else torch.cuda.device(device):
            kernel[(programs,)](*arguments, **constants)


def byte_of(ok: torch.Tensor | None) -> torch.Tensor | None:
    """Return a bool tensor as a byte tensor, which a kernel can store to; None stays None."""
    return None if ok is None else ok.view(torch.uint8)


def signed(words: tuple[int, int]) -> list[int]:
    """Return the two 32-bit words of a seed as signed integers with the same bits, which a launch takes."""
    return [word - (word >> 31 << 32) for word in words]


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Not to use instructions of PTX: Triton interprets, or compiles for GPUs of AMD or Intel.
PORTABLE = tl.constexpr(INTERPRETED.value or bool(torch.version.hip or getattr(torch.version, "xpu", None)))
ULP = tl.constexpr(2.0**-24)


@triton.jit
def uniform(at, seed, seed_high):
    """Return numbers in [0, 1) for 64-bit positions, from the two words of a seed."""
    h = mix(at.to(tl.uint32) ^ seed.to(tl.uint32, bitcast=True))
    return (mix(h ^ (at >> 32).to(tl.uint32) ^ seed_high.to(tl.uint32, bitcast=True)) >> 8).to(tl.float32) * ULP


@triton.jit
def mix(h):
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


@triton.jit
def rotate(x, signs_ptr):
    """Return blocks (width, blocks) rotated, given the signs of `rotation.py`."""
    signs = tl.load(signs_ptr + tl.arange(0, x.shape[0]))[:, None]
    return butterflies(x * (signs * (0.5 / x.shape[0])))


@triton.jit
def restore(x, signs_ptr):
    restored = butterflies(x * (1 / x.shape[0]))
    return restored * (tl.load(signs_ptr + tl.arange(0, x.shape[0]))[:, None] * (2 * x.shape[0]))


@triton.jit
def butterflies(x):
    """Return H x (`rotation.py`). A step combines positions that differ in the lowest bit, and makes it the highest."""
    WIDTH: tl.constexpr = x.shape[0]
    BLOCKS: tl.constexpr = x.shape[1]
    for step in tl.static_range(13):
        if 1 << step < WIDTH:
            a, b = tl.split(tl.permute(tl.reshape(x, (WIDTH // 2, 2, BLOCKS)), (0, 2, 1)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (2, 0, 1)), (WIDTH, BLOCKS))
    return x


@triton.jit
def rounded(x, dtype):
    """Return fp32 values in a narrower type, rounded to nearest on GPUs and in Triton's interpreter."""
    if INTERPRETED and dtype == tl.bfloat16:  # the interpreter cuts bits off; a GPU rounds, as here
        bits = x.to(tl.uint32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, near, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


# Triton spreads the first axis of a tile over a program's warps: they then share a block, and exchange its values and
# stripes through shared memory. Of *columns* (run, runs of a block, blocks) the last axis comes before the second: a
# warp takes whole blocks, and keeps them as the tile changes its shape.


@triton.jit
def columns_at(ptr, block, WIDTH, BLOCK):
    """Return pointers to whole blocks, of which a thread takes WIDTH values at once: in columns, if they are long."""
    RUN: tl.constexpr = 32 * WIDTH
    BYTES: tl.constexpr = WIDTH * (ptr.dtype.element_ty.primitive_bitwidth // 8)
    if BLOCK <= RUN:
        return tl.multiple_of(ptr + (block[None, :] * BLOCK + tl.arange(0, BLOCK)[:, None]), [BYTES, BYTES])
    else:
        place = tl.arange(0, RUN)[:, None, None] + tl.arange(0, BLOCK // RUN)[None, :, None] * RUN
        return tl.multiple_of(ptr + (block[None, None, :] * BLOCK + place), [BYTES, BYTES, BYTES])


@triton.jit
def in_columns(x, at):
    """Return a tile (width, blocks) in columns if its pointers are."""
    two: tl.constexpr = len(at.shape) == 2
    return x if two else tl.permute(tl.reshape(x, (at.shape[1], at.shape[0], x.shape[1])), (1, 0, 2))


@triton.jit
def in_blocks(x):
    two: tl.constexpr = len(x.shape) == 2
    return x if two else tl.reshape(tl.permute(x, (1, 0, 2)), (x.shape[1] * x.shape[0], x.shape[2]))


@triton.jit
def load(ptr, inside):
    return tl.load(ptr) if inside is None else tl.load(ptr, inside, 0)


@triton.jit
def store(ptr, value, inside):
    tl.store(ptr, rounded(value, ptr.dtype.element_ty), inside)
