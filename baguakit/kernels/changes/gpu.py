"""The operations of `definition.py` for GPUs: the same bytes. A program takes a block.

`few_kernel` packs blocks of which few words have changed, as after a step of training: each lane takes a bit for each
of 32 words, and only reads those that have changed again. `many_kernel` packs the blocks that it has left. Both write
where the values would begin, and `gather_kernel` moves what was packed together.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..gpu import launch, load, tiled
from . import definition as changes

fold = changes.fold  # what was packed is short

BLOCK, LINE = tl.constexpr(changes.BLOCK), tl.constexpr(changes.LINE)
LINES, BITMAP, ALL = tl.constexpr(changes.LINES), tl.constexpr(changes.BITMAP), tl.constexpr(changes.ALL)
COUNTS, BITS = tl.constexpr(changes.BLOCK // changes.LINE), tl.constexpr(changes.BLOCK // 8)
RUN, CHUNK = tl.constexpr(128), tl.constexpr(256)  # packed values, and values or bytes, that are handled at once
LANES = tl.constexpr(changes.BLOCK // 32)
FEW = tl.constexpr(496)  # of a block of at least half the length: up to here, LINES is the shortest kind
UNPACKED = tl.constexpr(-1)  # the head of a block, until `many_kernel` has packed it


@triton.jit
def ones_in(x):
    """Return how many bits of a uint32 are 1."""
    x -= (x >> 1) & 0x55555555
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    return ((((x + (x >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def difference(new, old, SIZE: tl.constexpr):
    """Return new − old modulo 2^(8 SIZE), signed, in int32 or int64."""
    d = wide(new) - wide(old)
    return (d << (32 - 8 * SIZE)) >> (32 - 8 * SIZE) if SIZE <= 2 else d


@triton.jit
def width(largest, SIZE: tl.constexpr):
    """Return the least number of bytes for signed numbers up to `largest`."""
    w = 1
    for byte in tl.static_range(1, SIZE):
        w += (largest >= (1 << (8 * byte - 1))).to(tl.int32)
    return w


@triton.jit(do_not_specialize=["n", "first"])
def few_kernel(heads_ptr, new_ptr, old_ptr, slots_ptr, words_ptr, n, first, SIZE: tl.constexpr, MASKED: tl.constexpr):
    block = (first + tl.program_id(0)).to(tl.int64)
    new_ptr, old_ptr, all_ = new_ptr + block * BLOCK, old_ptr + block * BLOCK, tl.arange(0, BLOCK)
    left = (n - block * BLOCK).to(tl.int32) if MASKED else BLOCK
    inside = all_ < left if MASKED else None
    changed = (load(new_ptr + all_, inside) != load(old_ptr + all_, inside)).to(tl.int32)
    bits = tl.sum(tl.reshape(changed, (BLOCK // 8, 8)) << tl.arange(0, 8)[None, :], 1)
    # Through memory each lane gets 32 bits; to move them between lanes, Triton would let four lanes do the same work.
    tl.store(slots_ptr + block * BLOCK * SIZE + tl.arange(0, BLOCK // 8), bits.to(tl.uint8))
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    bits = tl.load(words_ptr + block * (BLOCK * SIZE // 4) + lane).to(tl.uint32, bitcast=True)
    count = ones_in(bits)
    m, counts = tl.sum(count), tl.sum(tl.reshape(count, (COUNTS, LANES // COUNTS)), 1)
    few = (m <= FEW) & (tl.max(counts) < LINE) & (left >= BLOCK // 2)
    head = tl.where(m == 0, 0, UNPACKED)
    if few & (m > 0):
        out_ptr = slots_ptr + block * BLOCK * SIZE
        tl.store(out_ptr + tl.arange(0, COUNTS), counts.to(tl.uint8))
        k, largest = COUNTS + tl.cumsum(count) - count, tl.zeros((LANES,), tl.int64 if SIZE == 8 else tl.int32)
        for _ in range(tl.max(count)):
            there = bits != 0
            i = lane * 32 + ones_in((bits & (0 - bits)) - 1)
            new, old = load(new_ptr + i, there), load(old_ptr + i, there)
            d = difference(new, old, SIZE)
            largest |= d ^ tl.where(d < 0, -1, 0)
            tl.store(out_ptr + k, i.to(tl.uint8), there)
            for byte in tl.static_range(SIZE):  # those from w on lie behind what is packed
                tl.store(out_ptr + m + byte * m + k, (d >> 8 * byte).to(tl.uint8), there)
            tl.store(old_ptr + i, new, there)
            bits &= bits - 1
            k += 1
        head = m + (width(tl.max(largest), SIZE) << 16) + (LINES << 20)
    tl.store(heads_ptr + block, head)


@triton.jit(do_not_specialize=["n"])
def many_kernel(heads_ptr, new_ptr, old_ptr, slots_ptr, left_ptr, n, SIZE: tl.constexpr, MASKED: tl.constexpr):
    block = tl.load(left_ptr + tl.program_id(0))
    i = tl.arange(0, BLOCK)
    at = block * BLOCK + i
    left = (n - block * BLOCK).to(tl.int32) if MASKED else BLOCK
    inside = i < left if MASKED else None
    new, old = load(new_ptr + at, inside), load(old_ptr + at, inside)
    d = difference(new, old, SIZE)
    changed = d != 0
    ones = changed.to(tl.int32)
    m = tl.sum(ones)
    w = width(tl.max(d ^ tl.where(d < 0, -1, 0)), SIZE)
    counts = tl.sum(tl.reshape(ones, (COUNTS, LINE)), 1)
    in_lines, in_bitmap = m * (1 + w) + 16, m * w + BITS
    few = (in_lines <= in_bitmap) & (tl.max(counts) < LINE)
    dense = left * w < tl.where(few, in_lines, in_bitmap)
    kind = tl.where(dense, ALL, tl.where(few, LINES, BITMAP))
    k, every = tl.where(dense, i, tl.cumsum(ones) - 1), tl.where(dense, left, m)
    told, places = changed | (dense & (i < left)), 0
    out_ptr = slots_ptr + block * BLOCK * SIZE
    if kind == LINES:
        tl.store(out_ptr + tl.arange(0, COUNTS), counts.to(tl.uint8))
        tl.store(out_ptr + 16 + k, i.to(tl.uint8), changed)
        places = m + 16
    elif kind == BITMAP:
        bits = tl.reshape(ones, (BITS, 8)) << tl.arange(0, 8)[None, :]
        tl.store(out_ptr + tl.arange(0, BITS), tl.sum(bits, 1).to(tl.uint8))
        places += BITS
    for byte in tl.static_range(SIZE):
        tl.store(out_ptr + places + byte * every + k, (d >> 8 * byte).to(tl.uint8), told & (byte < w))
    tl.store(old_ptr + at, new, changed)
    tl.store(heads_ptr + block, every + (w << 16) + (kind << 20))


@triton.jit
def wide(x):
    return x if x.dtype == tl.int64 else x.to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])  # lanes load the bytes that they store: one after another
def gather_kernel(packed_ptr, slots_ptr, starts_ptr, lengths_ptr, SIZE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths_ptr + block).to(tl.int32)
    to_ptr, from_ptr = packed_ptr + tl.load(starts_ptr + block), slots_ptr + block * BLOCK * SIZE
    for start in range(0, length, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(to_ptr + at, tl.load(from_ptr + at, at < length, 0), at < length)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["packed_ptr"])
def apply_kernel(x_ptr, heads_ptr, starts_ptr, packed_ptr, n, SIZE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    head = tl.load(heads_ptr + block)
    m, w, kind = head & 0xFFFF, (head >> 16) & 15, head >> 20
    part_ptr, x_ptr = packed_ptr + tl.load(starts_ptr + block), x_ptr + block * BLOCK
    left = tl.minimum(n - block * BLOCK, BLOCK).to(tl.int32)
    if kind == LINES:
        for start in range(0, m, RUN):
            k = start + tl.arange(0, RUN)
            line, end = tl.zeros_like(k), 0
            for each in tl.static_range(COUNTS - 1):
                end += tl.load(part_ptr + each).to(tl.int32)
                line += (k >= end).to(tl.int32)
            i = line * LINE + tl.load(part_ptr + 16 + k, k < m, 0).to(tl.int32)
            add_told(x_ptr, i, part_ptr + 16 + m, k, m, w, (k < m) & (i < left), SIZE)
    elif kind != 0:
        before = 0
        for start in range(0, left, CHUNK):
            i = start + tl.arange(0, CHUNK)
            if kind == BITMAP:
                bits = tl.load(part_ptr + start // 8 + tl.arange(0, CHUNK // 8)).to(tl.int32)
                ones = tl.reshape((bits[:, None] >> tl.arange(0, 8)[None, :]) & 1, (CHUNK,))
                k = before + tl.cumsum(ones) - 1
                add_told(x_ptr, i, part_ptr + BITS, k, m, w, (ones != 0) & (k < m) & (i < left), SIZE)
                before += tl.sum(ones)
            else:
                add_told(x_ptr, i, part_ptr, i, m, w, (i < m) & (i < left), SIZE)


@triton.jit
def add_told(x_ptr, i, planes_ptr, k, m, w, inside, SIZE):
    """Add the k-th of m numbers of w bytes to word i."""
    x = tl.load(x_ptr + i, inside, 0)
    d = tl.zeros_like(wide(x))
    for byte in tl.static_range(SIZE):
        told = tl.load(planes_ptr + byte * m + k, inside & (byte < w), 0)
        d |= told.to(d.dtype) << 8 * byte
    unused = d.dtype.primitive_bitwidth - 8 * w
    d = (d << unused) >> unused  # the sign
    tl.store(x_ptr + i, (wide(x) + d).to(x.dtype), inside)


def encode(new: Tensor, old: Tensor, size: int) -> tuple[Tensor, list[Tensor]]:
    n, words = len(new) // size, changes.WORDS[size]
    count, there = -(-n // changes.BLOCK), new.device
    heads = torch.empty(count, dtype=torch.int32, device=there)
    slots = torch.empty(count * changes.BLOCK * size, dtype=torch.uint8, device=there)
    arguments, in_words = (heads, new.view(words), old.view(words), slots), slots.view(torch.int32)
    for first, blocks, masked in tiled(n, changes.BLOCK):
        facts = {"SIZE": size, "MASKED": masked}
        launch(few_kernel, blocks, *arguments, in_words, n, first, num_warps=4, **facts)
        left = first + (heads[first : first + blocks] == UNPACKED.value).nonzero()[:, 0]
        launch(many_kernel, len(left), *arguments, left, n, num_warps=8, **facts)
    lengths = changes.lengths_of(heads)
    ends = lengths.cumsum(0)
    packed = torch.empty(int(ends[-1]) if n else 0, dtype=torch.uint8, device=there)
    launch(gather_kernel, count, packed, slots, ends - lengths, lengths, SIZE=size, num_warps=2)
    return heads, [packed]


def add_(x: Tensor, size: int, heads: Tensor, starts: Tensor, packed: Tensor) -> None:
    arguments = x.view(changes.WORDS[size]), heads, starts, packed, len(x) // size
    launch(apply_kernel, len(heads), *arguments, SIZE=size, num_warps=4)
