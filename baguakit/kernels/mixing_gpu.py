"""The arithmetic of `mixing.py` for GPUs, with the same roundings. A program holds a tile of each tensor."""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from .gpu import byte_of, launch, rounded, store, tiled
from .mixing import WIDE

TILE = 2048  # values
WARPS = 4  # with 16 values a thread: of each tensor four 16-byte loads in flight in fp32
MOST = 8  # tensors mixed in by one launch


@triton.jit
def wide(x):
    """Return values in the dtype of the sum."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def places(first, TILE, MASKED):
    at = (first + tl.program_id(0)).to(tl.int64) * TILE + tl.arange(0, TILE)
    # Masked values move one by one, so adjacent values should belong to adjacent threads: promise no alignment.
    return tl.multiple_of(at, 1) if MASKED else at


@triton.jit
def load(ptr, inside):
    return wide(tl.load(ptr) if inside is None else tl.load(ptr, inside, 0))


@triton.jit
def add(total, y_ptr, at, inside, weights_ptr, weight, k):
    if y_ptr is None:
        return total
    else:
        return tl.fma(load(y_ptr + at, inside), factor(weights_ptr, weight, k), total)


@triton.jit
def factor(weights_ptr, weight, k):
    """Return weight k: from the device if `weights_ptr` is given, else the number `weight` of the launch."""
    return tl.full((1,), weight, tl.float32) if weights_ptr is None else tl.load(weights_ptr + k)


@triton.jit(do_not_specialize=["n", "first"], do_not_specialize_on_alignment=["weights_ptr"])
def mix_kernel(
    out_ptr, x_ptr, y1_ptr, y2_ptr, y3_ptr, y4_ptr, y5_ptr, y6_ptr, y7_ptr, y8_ptr,
    weights_ptr, w0, w1, w2, w3, w4, w5, w6, w7, w8, n, first,
    SCALED: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Compute out ← w₀ x + Σ w_k y_k, or x + Σ w_k y_k if x is a partial sum; absent tensors are None."""
    at = places(first, TILE, MASKED)
    inside = at < n if MASKED else None
    total = load(x_ptr + at, inside)
    if SCALED:
        total *= factor(weights_ptr, w0, 0)
    total = add(total, y1_ptr, at, inside, weights_ptr, w1, 1)
    total = add(total, y2_ptr, at, inside, weights_ptr, w2, 2)
    total = add(total, y3_ptr, at, inside, weights_ptr, w3, 3)
    total = add(total, y4_ptr, at, inside, weights_ptr, w4, 4)
    total = add(total, y5_ptr, at, inside, weights_ptr, w5, 5)
    total = add(total, y6_ptr, at, inside, weights_ptr, w6, 6)
    total = add(total, y7_ptr, at, inside, weights_ptr, w7, 7)
    total = add(total, y8_ptr, at, inside, weights_ptr, w8, 8)
    store(out_ptr + at, total, inside)


@triton.jit(do_not_specialize=["n", "first"], do_not_specialize_on_alignment=["good_ptr"])
def land_kernel(x_ptr, result_ptr, before_ptr, good_ptr, n, first, TILE: tl.constexpr, MASKED: tl.constexpr):
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    at = places(first, TILE, MASKED)
    inside = at < n if MASKED else None
    x, result, before = load(x_ptr + at, inside), load(result_ptr + at, inside), load(before_ptr + at, inside)
    change = wide(rounded(result - before, dtype))
    landed = tl.where(x == before, result, x + change)
    if good_ptr is not None:
        landed = tl.where(tl.load(good_ptr) != 0, landed, x)
    store(x_ptr + at, landed, inside)


def mix_(x: Tensor, others: Sequence[Tensor], weights: Sequence[float] | Tensor) -> None:
    """Mix any number of tensors, `MOST` in a launch. Between launches, the sum keeps its wide dtype."""
    if x.dtype == torch.float64 and not isinstance(weights, Tensor):
        # Triton takes numbers as fp32, so fp64 weights are in a tensor. The device fills it: a copy would wait.
        weights = torch.stack([x.new_full((), weight) for weight in weights])
    begun = x
    for start in range(0, max(len(others), 1), MOST):
        some = others[start : start + MOST]
        last = start + MOST >= len(others)
        out = x if last or x.dtype in WIDE else torch.empty_like(x, dtype=torch.float32) if begun is x else begun
        absent: list[None] = [None] * (MOST - len(some))
        if isinstance(weights, Tensor):
            factors: list[Any] = [weights[start:], *[None] * (MOST + 1)]  # what they weigh is read from there
        else:
            own = weights[0] if start == 0 else None
            factors = [None, own, *weights[start + 1 : start + 1 + len(some)], *absent]
        _launch(mix_kernel, x, out, begun, *some, *absent, *factors, SCALED=start == 0)
        begun = out


def land_(x: Tensor, result: Tensor, before: Tensor, good: Tensor | None = None) -> None:
    _launch(land_kernel, x, x, result, before, byte_of(good))


def _launch(kernel: Any, x: Tensor, *arguments: Any, **constants: bool) -> None:
    n, options = x.numel(), constants | {"TILE": TILE, "num_warps": WARPS, "enable_fp_fusion": False}
    for first, tiles, masked in tiled(n, TILE):
        launch(kernel, tiles, *arguments, n, first, MASKED=masked, **options)
