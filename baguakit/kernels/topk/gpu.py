"""The k largest values on GPUs: the bytes of the definition, without a copy of the values or a wait for the host.

A short row is held by one program, which finds the threshold bit by bit. In a long one it is found digit by digit: the
values that begin like the threshold, as far as it is known, are counted by their next digit, and a program for each
row chooses the digit in which the k-th largest lies. Then each program counts what it keeps, and from the running sums
of these counts knows where in the row's message to write it.

An fp32 row is read seven times, and once if it is short; the memory used beside the result is 2.4 KiB a row, and 16
bytes for each `TILE` of it.
"""

# What Triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..shared.devices import on
from . import definition

NAN = tl.constexpr(definition.NAN)

SHORT = 1 << 12  # values that one program holds
TILE, WARPS = 4096, 8
KEPT_TILE, KEPT_WARPS = 1024, 4  # what keeps needs more registers, and small programs to hide each other's waiting
MANY = 1 << 22  # values from which on a program takes several tiles, and adds up their counts in registers
# The shift and the bits of each digit. Triton's histogram takes instructions for every bin beyond 32. When 15 bits are
# known, few values begin like the threshold, unless most are equal: they are counted one by one, whatever the bins.
# The low bits of a half are zeros.
DIGITS = ((26, 5), (21, 5), (16, 5), (8, 8), (0, 8))
USED = {torch.bfloat16: DIGITS[:3], torch.float16: DIGITS[:4]}
FEW = tl.constexpr(64)  # values of a tile


@triton.jit
def divided(at, left):
    """Return which values lie in groups of four that are all there, and move together, and which others are there."""
    whole = at // 4 * 4 + 3 < left
    return whole, (at < left) & ~whole


@triton.jit
def load(tile_ptr, left, TILE: tl.constexpr):
    """Return a tile of values in fp32, and their sizes: −1, less than any, behind the `left` that are there."""
    at, left = tl.arange(0, TILE), tl.minimum(left, TILE).to(tl.int32)
    if left == TILE:
        v = tl.load(tile_ptr + at).to(tl.float32)
    else:
        whole, rest = divided(at, left)
        v = tl.load(tile_ptr + at, whole, 0).to(tl.float32)
        v = tl.where(whole, v, tl.load(tile_ptr + at, rest, 0).to(tl.float32))
    size = tl.where(v == v, v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, NAN)
    return v, tl.where(at < left, size, -1)


@triton.jit
def keep(message_ptr, lost_ptr, v, size, first, left, k, threshold, equals, larger, equal, TILE: tl.constexpr):
    """Write what a tile keeps, given how many `larger` and `equal` sizes come before; `equals` of the row are kept.

    Returns how many come before the next tile.
    """
    at = tl.arange(0, TILE)
    both = tl.cumsum((size > threshold).to(tl.int32) * 65536 + (size == threshold).to(tl.int32), 0)  # at most TILE each
    larger_to, equal_to = larger + (both >> 16), equal + (both & 0xFFFF)
    kept = (size > threshold) | ((size == threshold) & (equal_to <= equals))
    slot = message_ptr + (larger_to + tl.minimum(equal_to, equals) - 1)
    tl.store(slot, tl.where(v == v, v.to(tl.int32, bitcast=True), NAN), kept)
    tl.store(slot + k, at + tl.cast(first, tl.int32), kept)
    if lost_ptr is not None:
        lost = tl.where(kept, v - v, v)
        if left >= TILE:
            tl.store(lost_ptr + at, lost)
        else:
            whole, rest = divided(at, left)
            tl.store(lost_ptr + at, lost, whole)
            tl.store(lost_ptr + at, lost, rest)
    return larger + tl.sum((size > threshold).to(tl.int32)), equal + tl.sum((size == threshold).to(tl.int32))


@triton.jit(do_not_specialize=["n", "k"])
def short_kernel(message_ptr, residual_ptr, x_ptr, stride, n, k, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    v, size = load(x_ptr + row * stride, n, TILE)
    threshold = tl.zeros((1,), tl.int32)
    for bit in range(31):
        candidate = threshold + (1073741824 >> bit)
        enough = tl.sum((size >= candidate).to(tl.int32)) >= k
        threshold = tl.where(enough, candidate, threshold)
    equals = k - tl.sum((size > threshold).to(tl.int32))
    lost_ptr = residual_ptr if residual_ptr is None else residual_ptr + row * stride
    keep(message_ptr + row * (2 * k), lost_ptr, v, size, 0, n, k, threshold, equals, 0, 0, TILE)


# Long rows. A program takes `TILES` tiles of row `program // programs`.


@triton.jit
def locate(programs, TILE: tl.constexpr, TILES: tl.constexpr):
    """Return the row of a program, and the first place of its tiles."""
    row = (tl.program_id(0) // programs).to(tl.int64)
    return row, (tl.program_id(0) % programs).to(tl.int64) * (TILE * TILES)


@triton.jit(do_not_specialize=["n", "programs"])
def digits_kernel(
    counts_ptr, state_ptr, x_ptr, stride, n, programs,
    SHIFT: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Count the next digit of the sizes that begin like the threshold."""
    row, start = locate(programs, TILE, TILES)
    begins = tl.load(state_ptr + 2 * row) >> (SHIFT + BITS)
    bins = tl.arange(0, 1 << BITS)
    count = tl.zeros((1 << BITS,), tl.int32)
    for tile in range(TILES):
        first = start + tile * TILE
        _, size = load(x_ptr + row * stride + first, n - first, TILE)
        digit, begun = (size >> SHIFT) & ((1 << BITS) - 1), (size >> (SHIFT + BITS)) == begins
        if BITS > 5 and tl.sum(begun.to(tl.int32)) <= FEW:
            tl.atomic_add(counts_ptr + row * (1 << BITS) + digit, 1, begun, sem="relaxed")
        else:
            count += tl.histogram(digit, 1 << BITS, begun)
    tl.atomic_add(counts_ptr + row * (1 << BITS) + bins, count, count > 0, sem="relaxed")


@triton.jit
def choose_kernel(counts_ptr, state_ptr, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """Append to the threshold of a row its next digit, and find how many of the sizes that begin so are to be kept."""
    row = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, 1 << BITS)
    count = tl.load(counts_ptr + row * (1 << BITS) + bins)
    threshold, wanted = tl.load(state_ptr + 2 * row), tl.load(state_ptr + 2 * row + 1)
    above = tl.sum(count) - tl.cumsum(count, 0)
    chosen = (above < wanted) & (above + count >= wanted)  # one bin
    tl.debug_barrier()  # every warp has read the state
    tl.store(state_ptr + 2 * row, threshold + (tl.sum(tl.where(chosen, bins, 0)) << SHIFT))
    tl.store(state_ptr + 2 * row + 1, wanted - tl.sum(tl.where(chosen, above, 0)))


@triton.jit(do_not_specialize=["n", "programs"])
def count_kernel(kept_ptr, state_ptr, x_ptr, stride, n, programs, TILE: tl.constexpr, TILES: tl.constexpr):
    """Count the sizes larger than the threshold, and those equal to it."""
    row, start = locate(programs, TILE, TILES)
    threshold = tl.load(state_ptr + 2 * row)
    larger, equal = tl.zeros((TILE,), tl.int32), tl.zeros((TILE,), tl.int32)
    for tile in range(TILES):
        first = start + tile * TILE
        _, size = load(x_ptr + row * stride + first, n - first, TILE)
        larger += (size > threshold).to(tl.int32)
        equal += (size == threshold).to(tl.int32)
    tl.store(kept_ptr + tl.program_id(0), tl.sum(larger))
    tl.store(kept_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(equal))


@triton.jit(do_not_specialize=["n", "k", "programs"])
def keep_kernel(
    message_ptr, residual_ptr, kept_ptr, upto_ptr, state_ptr, x_ptr, stride, n, k, programs,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    row, start = locate(programs, TILE, TILES)
    threshold, equals = tl.load(state_ptr + 2 * row), tl.load(state_ptr + 2 * row + 1)
    here, other = tl.program_id(0), tl.num_programs(0) + tl.program_id(0)
    larger = tl.load(upto_ptr + here) - tl.load(kept_ptr + here)
    equal = tl.load(upto_ptr + other) - tl.load(kept_ptr + other)
    for tile in range(TILES):
        first = start + tile * TILE
        v, size = load(x_ptr + row * stride + first, n - first, TILE)
        lost_ptr = residual_ptr if residual_ptr is None else residual_ptr + row * stride + first
        larger, equal = keep(
            message_ptr + row * (2 * k), lost_ptr, v, size, first, n - first, k, threshold, equals, larger, equal, TILE
        )


# The launcher, with the arguments of the definition.


def compress(x: Tensor, k: int, residual: Tensor | None = None) -> Tensor:
    x = x.contiguous()
    rows, n = x.shape
    message = torch.empty(rows, 2 * k, dtype=torch.int32, device=x.device)
    if message.numel():
        with on(x.device):
            # A single row begins where the tensor does, whatever its length: zero keeps its accesses wide.
            (_short if n <= SHORT else _long)(message, residual, x, n if rows > 1 else 0, k)
    return message.view(torch.uint8)


def _short(message: Tensor, residual: Tensor | None, x: Tensor, stride: int, k: int) -> None:
    tile = max(1024, triton.next_power_of_2(x.shape[1]))
    short_kernel[(len(x),)](message, residual, x, stride, x.shape[1], k, TILE=tile, num_warps=tile // 512)


def _long(message: Tensor, residual: Tensor | None, x: Tensor, stride: int, k: int) -> None:
    rows, n = x.shape
    tiles = 8 if x.numel() >= MANY else 1
    programs = triton.cdiv(n, TILE * tiles)
    options: dict[str, Any] = {"TILE": TILE, "TILES": tiles, "num_warps": WARPS}
    state = torch.zeros(rows, 2, dtype=torch.int32, device=x.device)  # threshold, and how many are wanted of its equals
    state[:, 1].fill_(k)
    for shift, bits in USED.get(x.dtype, DIGITS):
        counts = torch.zeros(rows, 1 << bits, dtype=torch.int32, device=x.device)
        digit = {"SHIFT": shift, "BITS": bits}
        digits_kernel[(rows * programs,)](counts, state, x, stride, n, programs, **digit, **options)
        choose_kernel[(rows,)](counts, state, **digit, num_warps=4)
    kept = torch.empty(2, rows, programs, dtype=torch.int32, device=x.device)
    count_kernel[(rows * programs,)](kept, state, x, stride, n, programs, **options)
    upto = kept.cumsum(2, dtype=torch.int32)
    options = {"TILE": KEPT_TILE, "TILES": tiles * TILE // KEPT_TILE, "num_warps": KEPT_WARPS}
    keep_kernel[(rows * programs,)](message, residual, kept, upto, state, x, stride, n, k, programs, **options)
