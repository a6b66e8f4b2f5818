"""The k largest values of each chunk on GPUs: the same values as in the definition, without a wait for the host.

A program holds a chunk in registers: it reads each value once, finds the threshold by bisection, and writes what it
keeps. The bisection begins between the least and the largest of the maxima of neighbours, and ends as soon as exactly
k values are as large as a candidate: after ten counts of most chunks, and 31 at the most.
"""

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from . import topk
from .gpu import on

NAN = tl.constexpr(topk.NAN)
NEIGHBOURS = tl.constexpr(16)
ZEROS = {torch.bfloat16: 16, torch.float16: 13}  # the lowest bits of a size
# Of a thread, at the most: three programs of the longest chunk then share a multiprocessor of NVIDIA's, so that one
# computes while others read. Some values are spilled, and yet an H100 takes 0.6 of the time with a residual.
REGISTERS = 80


@triton.jit
def divided(at, left):
    """Return which values lie in groups of four that are all there, and move together, and which others are there."""
    whole = at // 4 * 4 + 3 < left
    return whole, (at < left) & ~whole


@triton.jit
def load(chunk_ptr, left, CHUNK: tl.constexpr):
    """Return a chunk of values in fp32, zeros behind the `left` that are there."""
    at = tl.arange(0, CHUNK)
    if left == CHUNK:
        v = tl.load(chunk_ptr + at).to(tl.float32)
    else:
        whole, others = divided(at, left)
        v = tl.load(chunk_ptr + at, whole, 0).to(tl.float32)
        v = tl.where(whole, v, tl.load(chunk_ptr + at, others, 0).to(tl.float32))
    return v


@triton.jit
def store(chunk_ptr, v, left, CHUNK: tl.constexpr):
    at = tl.arange(0, CHUNK)
    if left == CHUNK:
        tl.store(chunk_ptr + at, v)
    else:
        whole, others = divided(at, left)
        tl.store(chunk_ptr + at, v, whole)
        tl.store(chunk_ptr + at, v, others)


@triton.jit
def threshold_of(size, k, CHUNK: tl.constexpr):
    """Return the largest size that `k` reach, or one that exactly `k` reach."""
    maxima = tl.max(tl.reshape(size, (CHUNK // NEIGHBOURS, NEIGHBOURS)), 1)
    low, high = tl.where(k <= CHUNK // NEIGHBOURS, tl.min(maxima), 0), tl.max(maxima) + 1
    reached = k + 1
    while (high - low > 1) & (reached != k):
        middle = low + (high - low) // 2
        count = -tl.sum((middle - 1 - size) >> 31)  # fewer instructions than comparisons
        enough = count >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        reached = tl.where(enough, count, reached)
    return low


@triton.jit(do_not_specialize=["n", "chunks", "k", "rest"])
def select_kernel(
    places_ptr, values_ptr, residual_ptr, x_ptr, stride, n, chunks, k, rest, CHUNK: tl.constexpr, ZEROS: tl.constexpr
):
    row, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    start, slot = row * stride + chunk.to(tl.int64) * CHUNK, row * (n // CHUNK * k + rest) + chunk.to(tl.int64) * k
    left = tl.minimum(n - chunk.to(tl.int64) * CHUNK, CHUNK).to(tl.int32)
    at, wanted = tl.arange(0, CHUNK), tl.where(left == CHUNK, k, rest)
    v = load(x_ptr + start, left, CHUNK)
    bits = tl.where(v == v, v.to(tl.int32, bitcast=True), NAN)
    size = tl.where(at < left, (bits & 0x7FFFFFFF) >> ZEROS, -1)
    threshold = threshold_of(size, wanted, CHUNK)
    larger, equal = (size > threshold).to(tl.int32), (size == threshold).to(tl.int32)
    equals = wanted - tl.sum(larger)
    both = tl.cumsum(larger * 65536 + equal, 0)  # at most CHUNK each
    equal_to = both & 0xFFFF
    kept = (size > threshold) | ((size == threshold) & (equal_to <= equals))
    slots = (both >> 16) + tl.minimum(equal_to, equals) - 1
    tl.store(places_ptr + slot + slots, at, kept)
    tl.store(values_ptr + slot + slots, bits.to(tl.float32, bitcast=True), kept)
    if residual_ptr is not None:
        store(residual_ptr + start, tl.where(kept, v - v, v), left, CHUNK)


def options_of(chunk: int) -> dict[str, Any]:
    """Return the options with which the kernel is launched."""
    return {"num_warps": max(1, chunk // 512)} | ({} if torch.version.hip else {"maxnreg": REGISTERS})


def select(x: Tensor, chunk: int, k: int, rest: int, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernel, with the arguments and results of the definition."""
    x = x.contiguous()
    rows, n = x.shape
    places = torch.empty(rows, n // chunk * k + rest, dtype=torch.int32, device=x.device)
    values = torch.empty(places.shape, dtype=torch.float32, device=x.device)
    if places.numel():
        chunks = triton.cdiv(n, chunk)
        # A single row begins where the tensor does, whatever its length: zero keeps its accesses wide.
        stride = n if rows > 1 else 0
        with on(x.device):
            select_kernel[(rows * chunks,)](
                places, values, residual, x, stride, n, chunks, k, rest,
                CHUNK=chunk, ZEROS=ZEROS.get(x.dtype, 0), **options_of(chunk),
            )  # fmt: skip
    return places, values
