"""The arithmetic of `mixing.py` for GPUs, with the same roundings. A program holds a tile of each tensor."""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .gpu import byte_of, launch, load, rounded, store, tiled
from .mixing import WIDE

TILE = 2048  # values
WARPS = 4  # with 16 values a thread: of each tensor four 16-byte loads in flight in fp32
MOST = 8  # tensors mixed in by one launch


@triton.jit
def wide(x):
    """Return values in the dtype of sums: fp64 for fp64, else fp32."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def places(first, TILE, MASKED):
    at = (first + tl.program_id(0)).to(tl.int64) * TILE + tl.arange(0, TILE)
    # Masked values move one by one. Without a hint of alignment, Triton gives adjacent values to adjacent threads.
    return tl.multiple_of(at, 1) if MASKED else at


@triton.jit(do_not_specialize=["n", "first"])
def mix_kernel(
    out_ptr, x_ptr, y1_ptr, y2_ptr, y3_ptr, y4_ptr, y5_ptr, y6_ptr, y7_ptr, y8_ptr, w0: tl.float64, w1: tl.float64,
    w2: tl.float64, w3: tl.float64, w4: tl.float64, w5: tl.float64, w6: tl.float64, w7: tl.float64, w8: tl.float64,
    n, first, SCALED: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute out ← w₀ x + Σ w_k y_k, or x + Σ w_k y_k if x is a partial sum; absent tensors are None."""
    at = places(first, TILE, MASKED)
    inside = at < n if MASKED else None
    total = wide(load(x_ptr + at, inside))
    if SCALED:
        total *= tl.full((1,), w0, total.dtype)
    others, weights = (y1_ptr, y2_ptr, y3_ptr, y4_ptr, y5_ptr, y6_ptr, y7_ptr, y8_ptr), (w1, w2, w3, w4, w5, w6, w7, w8)
    for k in tl.static_range(8):
        if others[k] is not None:
            y = wide(load(others[k] + at, inside))
            total = tl.fma(y, tl.full((1,), weights[k], total.dtype), total)
    store(out_ptr + at, total, inside)


@triton.jit(do_not_specialize=["n", "first"], do_not_specialize_on_alignment=["good_ptr"])
def land_kernel(x_ptr, result_ptr, before_ptr, good_ptr, n, first, TILE: tl.constexpr, MASKED: tl.constexpr):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    at = places(first, TILE, MASKED)
    inside = at < n if MASKED else None
    x, result = wide(load(x_ptr + at, inside)), wide(load(result_ptr + at, inside))
    before = wide(load(before_ptr + at, inside))
    change = wide(rounded(result - before, dtype))
    landed = tl.where(x == before, result, x + change)
    if good_ptr is not None:
        landed = tl.where(tl.load(good_ptr) != 0, landed, x)
    store(x_ptr + at, landed, inside)


def mix_(x: Tensor, others: Sequence[Tensor], weights: Sequence[float]) -> None:
    """Mix any number of tensors, at most `MOST` per launch. Between launches, the sum stays in fp32 or fp64."""
    begun = x
    for start in range(0, max(len(others), 1), MOST):
        some, factors = others[start : start + MOST], weights[start + 1 : start + MOST + 1]
        last = start + MOST >= len(others)
        out = x if last or x.dtype in WIDE else torch.empty_like(x, dtype=torch.float32) if begun is x else begun
        missing = MOST - len(some)
        arguments = out, begun, *some, *[None] * missing, weights[0], *factors, *[0.0] * missing
        _launch(mix_kernel, x, *arguments, SCALED=start == 0)
        begun = out


def land_(x: Tensor, result: Tensor, before: Tensor, good: Tensor | None = None) -> None:
    _launch(land_kernel, x, x, result, before, byte_of(good))


def _launch(kernel: Any, x: Tensor, *arguments: Any, **constants: bool) -> None:
    n, options = x.numel(), constants | {"TILE": TILE, "num_warps": WARPS, "enable_fp_fusion": False}
    for first, tiles, masked in tiled(n, TILE):
        launch(kernel, tiles, *arguments, n, first, MASKED=masked, **options)
