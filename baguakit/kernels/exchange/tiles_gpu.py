"""Tiles of an exchange in one kernel: encoded to the memory of other ranks, averaged, and decoded.

The memory of a rank has two halves, each with packed rows, and behind them the words of signals. Exchanges use the
halves in turn. A rank that begins an exchange has ended the one before; so all others have begun that one, and ended
what came before it: nobody reads the half any more. For this, every exchange has equally many CTAs, and each counts
every exchange. The count is in device memory, so that a CUDA graph can repeat a launch.

Values cross in a format's codes and headers or, if DECODE is None, as numbers of the dtype WORD. With EXACT the numbers
are multiplied by a factor before they are sent, and added, as in an all-reduce; else they are added and then divided by
n. Integers are bytes of any kind: they cross as they are.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..blockwise.format import PLANES, Format, aligned, twin_of
from ..blockwise.gpu import WARP, WORDS
from ..blockwise.tiles_gpu import ROTATED, averaged, load_values, locate, quantized, store_codes, values_at
from ..gpu import columns_at, in_blocks, in_columns, load, restore, rotate, rounded, store
from ..rotation import signs_of
from .signals_gpu import announce, heard, word_at

LINE = 128  # bytes
TILE = 4 * WARP  # values that a CTA takes at once
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
DTYPES |= {torch.int8: tl.int8, torch.int16: tl.int16, torch.int32: tl.int32, torch.int64: tl.int64}


@dataclass(frozen=True)
class Memory:
    """The memory of all ranks of a node, as one rank sees it.

    Attributes:
        rank, ranks: this rank, and how many there are.
        addresses: int64 (ranks,), the address of each rank's memory, on this rank's device.
        counters: int32 (ctas,), the number of exchanges so far, on this rank's device.
        control: int32 (1 + ranks,). A host that writes the first ends all waits. A kernel that gives up waiting for
            rank r writes 1 to place 1 + r.
        half_bytes: of each of the two halves.
        limit: nanoseconds after which a wait gives up.
        neighbors: whether it is for exchanges between neighbours (`rows_gpu.py`), or for those of all ranks.
    """

    rank: int
    ranks: int
    addresses: Tensor
    counters: Tensor
    control: Tensor
    half_bytes: int
    limit: int
    neighbors: bool = False

    @property
    def ctas(self) -> int:
        """Return the number of CTAs of every exchange."""
        return len(self.counters)

    def must_hold(self, what: str, needed: int, neighbors: bool = False) -> None:
        """Raise a ValueError if an exchange needs more bytes than a half has, or a memory for the other exchanges."""
        if needed > self.half_bytes:
            raise ValueError(f"{what} needs {needed:,} bytes; half the memory is {self.half_bytes:,}")
        if neighbors != self.neighbors:
            kinds = "between neighbours", "of all ranks"
            theirs, others = kinds if self.neighbors else kinds[::-1]
            raise ValueError(f"{what} is an exchange {others}, and the memory is for those {theirs}: give it its own")


@dataclass(frozen=True)
class Wire:
    """The form in which values cross: a format with blocks, or numbers of a dtype (see above for `exact`)."""

    form: Format | None
    block: int = 1024
    dtype: torch.dtype = torch.float32
    exact: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or (self.exact and not self.dtype.is_floating_point):
            raise TypeError(f"a kernel that exchanges adds float32, bfloat16 or float16, not {self.dtype}")

    def row_bytes(self, n: int) -> int:
        """Return the bytes of a packed row of `n` values, a multiple of 16."""
        return aligned(n * self.dtype.itemsize) if self.form is None else self.form.row_bytes(n, self.block)

    def arguments(self, n: int, device: torch.device) -> tuple[Tensor | None, int, int]:
        """Return the signs of the rotation, the bytes of a row, and where its headers begin."""
        if self.form is None:
            return None, self.row_bytes(n), 0
        layout = self.form.layout(n, self.block)
        return signs_of(self.block, device) if self.form.rotated else None, layout.row, layout.header_at

    @lru_cache(maxsize=1024)  # noqa: B019 wires are few, and so are lengths of buckets
    def constants(self, n: int, itemsize: int, at_16: bool) -> dict[str, Any]:
        """Return constants and options for rows of `n` values, all of which begin at 16 bytes if `at_16`."""
        tile, width = max(self.block, TILE) // self.block * self.block, 16 // itemsize
        # With 8 warps nearly all of a thread's values fit in its registers; with 1 bit, whose words hold codes from all
        # over a tile, 4 spill less: 312 bytes at the most.
        warps = 4 if self.form is not None and self.form.bits == 1 else 8
        common = {"BLOCK": self.block, "BLOCKS": tile // self.block, "THREADS": 32 * warps, "num_warps": warps}
        common |= {"NARROW": n % 16 != 0 or not at_16, "EXACT": self.exact, "enable_fp_fusion": False}
        if self.form is None:
            names = dict.fromkeys(("ADD_UP", "MEASURE", "ENCODE", "DECODE"))
            form: tuple[int, ...] = (8, False, False)
            word, width = DTYPES[self.dtype], min(width, 16 // self.dtype.itemsize)
        else:
            module, bits = twin_of(self.form), self.form.bits
            names = {"MEASURE": module.measure, "ENCODE": module.encode, "DECODE": module.decode}
            names["ADD_UP"] = module.add_up if bits in (1, 2, 4) else None
            form, word = (bits, self.form.padded, self.form.rotated, *self.form.numbers), WORDS[self.form.header_bytes]
            width = min(width, PLANES[bits][0] * WARP // 256)
        return common | names | {"FORM": form, "WORD": word, "WIDTH": gcd(width, n) if at_16 else 1}


@triton.jit
def memory_of(peers_ptr, rank):
    """Return the address of a rank's memory."""
    return tl.load(peers_ptr + rank).to(tl.pointer_type(tl.uint8))


@triton.jit
def tell_all(peers_ptr, words_at, hop, ranks, rank, number, THREADS: tl.constexpr):
    """Signal to all ranks, this one as well, that this CTA has stored what it has for them in a hop."""
    places = tl.arange(0, THREADS)
    words = word_at(memory_of(peers_ptr, tl.minimum(places, ranks - 1)), words_at, hop, ranks, rank)
    announce(words, number, places, ranks)


@triton.jit
def all_heard(own_ptr, words_at, hop, ranks, number, control_ptr, limit, THREADS: tl.constexpr):
    """Wait for this CTA of all ranks in a hop, and return whether all have come."""
    senders = tl.arange(0, THREADS) % ranks
    return heard(word_at(own_ptr, words_at, hop, ranks, senders), number, senders, control_ptr, limit, THREADS)


@triton.jit
def tiles_of(n, length, shards, TILE, MASKED):
    """Return the first tile of this CTA, of those that are whole in all shards or of the others, and where they end."""
    # Where the shards hold more than the values, the last one ends with zeros, in the masked tiles behind `whole`.
    whole, cta, ctas = (length - (shards - 1) * n) // TILE, tl.program_id(0), tl.num_programs(0)
    return (whole + (cta + ctas - whole % ctas) % ctas, (n + (TILE - 1)) // TILE) if MASKED else (cta, whole)


@triton.jit
def place_of(tile, shard, n, length, FORM, BLOCK, BLOCKS, MASKED):
    """Return blocks and places of a tile of a shard, and masks: of the places in its row, and of those with a value."""
    block, at, inside = locate(tile, n, FORM, BLOCK, BLOCKS, MASKED)
    return block, at, inside, inside & (shard * n + at < length)


@triton.jit
def pointers(ptr, block, at, MASKED, WIDTH, BLOCK):
    """Return pointers to the values of a tile, in columns if it is whole."""
    return values_at(ptr, at, WIDTH, True) if MASKED else columns_at(ptr, block, WIDTH, BLOCK)


@triton.jit
def load_tile(ptr, block, at, present, MASKED, WIDTH, BLOCK):
    return in_blocks(load(pointers(ptr, block, at, MASKED, WIDTH, BLOCK), present if MASKED else None))


@triton.jit
def store_tile(ptr, x, block, at, present, MASKED, WIDTH, BLOCK):
    there = pointers(ptr, block, at, MASKED, WIDTH, BLOCK)
    store(there, in_columns(x, there), present if MASKED else None)


@triton.jit
def packed(x, plain, n, block, inside, MEASURE, ENCODE, WORD, FORM, BLOCK, MASKED):
    """Return the codes of a tile and its headers, or its numbers and 0."""
    if MEASURE is None:
        return rounded(x, WORD), 0
    else:
        return quantized(x, plain, None, n, block, inside, MEASURE, ENCODE, FORM, BLOCK, MASKED)


@triton.jit
def unpacked(codes, word, DECODE, FORM):
    """Return the values of a packed tile, which are rotated if the format rotates."""
    if DECODE is None:
        return codes.to(tl.float32)
    else:
        return DECODE(codes, word, FORM)


@triton.jit
def widened(x):
    """Return numbers in fp32, but integers as they are."""
    return x.to(tl.float32) if tl.constexpr(x.dtype.is_floating()) else x


@triton.jit
def spread(
    peers_ptr, first, count, ranks, row_at, header_at, codes, word, n, block, at, inside,
    DECODE, WORD, FORM, BLOCK, MASKED, WIDTH,
):  # fmt: skip
    """Store a packed tile in the memory of `count` ranks, from rank `first` on."""
    for step in range(count):
        row_ptr = memory_of(peers_ptr, (first + step) % ranks) + row_at
        if DECODE is None:
            store_tile(row_ptr.to(tl.pointer_type(WORD)), codes, block, at, inside, MASKED, WIDTH, BLOCK)
        else:
            store_codes(row_ptr, header_at, codes, word, n, block, WORD, FORM, BLOCK, MASKED, WIDTH, not MASKED)


@triton.jit
def fetched(row_ptr, header_at, n, block, at, inside, DECODE, WORD, FORM, BLOCK, MASKED, WIDTH):
    """Return the values of a tile of a packed row, which are rotated if the format rotates."""
    if DECODE is None:
        return widened(load_tile(row_ptr.to(tl.pointer_type(WORD)), block, at, inside, MASKED, WIDTH, BLOCK))
    else:
        return load_values(row_ptr, header_at, n, block, DECODE, WORD, FORM, BLOCK, MASKED, WIDTH, not MASKED)


@triton.jit
def send(
    x_ptr, residual_ptr, peers_ptr, first, count, ranks, row_at, signs_ptr, header_at, shard, shards, n, length, factor,
    MEASURE, ENCODE, DECODE, WORD, FORM, BLOCK, BLOCKS, WIDE,
):  # fmt: skip
    """Pack a shard, times a factor if there is one, for `count` ranks from `first` on; store what is lost."""
    for MASKED in tl.static_range(2):
        begin, end = tiles_of(n, length, shards, BLOCK * BLOCKS, MASKED)
        for tile in range(begin, end, tl.num_programs(0)):
            WIDTH: tl.constexpr = 1 if MASKED else WIDE  # masked values move one by one
            block, at, inside, present = place_of(tile, shard, n, length, FORM, BLOCK, BLOCKS, MASKED)
            x = widened(load_tile(x_ptr + shard * n, block, at, present, MASKED, WIDTH, BLOCK))
            x = x if factor is None else x * factor
            coded = rotate(x, signs_ptr) if FORM[ROTATED] else x
            codes, word = packed(coded, False, n, block, inside, MEASURE, ENCODE, WORD, FORM, BLOCK, MASKED)
            spread(
                peers_ptr, first, count, ranks, row_at, header_at, codes, word, n, block, at, inside,
                DECODE, WORD, FORM, BLOCK, MASKED, WIDTH,
            )  # fmt: skip
            if residual_ptr is not None:
                values = unpacked(codes, word, DECODE, FORM)
                lost = x - (restore(values, signs_ptr) if FORM[ROTATED] else values)
                store_tile(residual_ptr + shard * n, lost, block, at, present, MASKED, WIDTH, BLOCK)


@triton.jit
def average(
    residual_ptr, peers_ptr, inbox_ptr, row_at, signs_ptr, row_bytes, header_at, rank, ranks, n, length,
    ADD_UP, MEASURE, ENCODE, DECODE, WORD, FORM, BLOCK, BLOCKS, WIDE, EXACT,
):  # fmt: skip
    """Average this rank's shard over the rows of its inbox, and store it in a row of every rank."""
    for MASKED in tl.static_range(2):
        begin, end = tiles_of(n, length, ranks, BLOCK * BLOCKS, MASKED)
        for tile in range(begin, end, tl.num_programs(0)):
            WIDTH: tl.constexpr = 1 if MASKED else WIDE
            block, at, inside, present = place_of(tile, rank, n, length, FORM, BLOCK, BLOCKS, MASKED)
            if DECODE is None:
                plain: tl.constexpr = False
                mean = summed(
                    None, inbox_ptr, row_bytes, None, None, None, header_at, rank, ranks, n, block, at, inside,
                    DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH, -1.0 if EXACT else 1.0,
                )  # fmt: skip
                mean = mean if EXACT else tl.div_rn(mean, tl.zeros_like(mean) + ranks)
            else:
                mean, plain = averaged(
                    inbox_ptr, ranks, row_bytes, header_at, n, block, inside,
                    None if MASKED else ADD_UP, DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH, not MASKED,
                )  # fmt: skip
            codes, word = packed(mean, plain, n, block, inside, MEASURE, ENCODE, WORD, FORM, BLOCK, MASKED)
            spread(
                peers_ptr, rank + 1, ranks, ranks, row_at, header_at, codes, word, n, block, at, inside,
                DECODE, WORD, FORM, BLOCK, MASKED, WIDTH,
            )  # fmt: skip
            if residual_ptr is not None:
                lost = mean - unpacked(codes, word, DECODE, FORM)
                lost = restore(lost, signs_ptr) if FORM[ROTATED] else lost
                begun = load_tile(residual_ptr + rank * n, block, at, present, MASKED, WIDTH, BLOCK)
                store_tile(residual_ptr + rank * n, begun + lost * ranks, block, at, present, MASKED, WIDTH, BLOCK)


@triton.jit
def summed(
    own_ptr, inbox_ptr, row_bytes, heard_ptr, weights_ptr, signs_ptr, header_at, rank, ranks, n, block, at, inside,
    DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH, SIGN,
):  # fmt: skip
    """Return the sum of a tile of rows, each restored, in the order of ranks.

    They are added to a zero of a SIGN; that of -1.0 changes no sum. With weights, the sum is that of `Compressor.add_`,
    restored at last; with values of one's own and a word for each rank, 0 where its row does not count, `mixing.py`'s.
    """
    total = tl.zeros((BLOCK, BLOCKS), tl.float32) * SIGN  # `tl.full` would take -0.0 for 0.0
    if own_ptr is not None:
        total = widened(load_tile(own_ptr, block, at, inside, MASKED, WIDTH, BLOCK)) * tl.load(weights_ptr + rank)
    UNROLL: tl.constexpr = 1 if MASKED or weights_ptr is not None or FORM[ROTATED] else 4
    for peer in tl.range(ranks, loop_unroll_factor=UNROLL):
        if own_ptr is None or ((tl.load(heard_ptr + peer) > 0) & (peer != rank)):
            row_ptr = inbox_ptr + tl.cast(peer, tl.int64) * row_bytes
            y = fetched(row_ptr, header_at, n, block, at, inside, DECODE, WORD, FORM, BLOCK, MASKED, WIDTH)
            if weights_ptr is None:
                total += restore(y, signs_ptr) if FORM[ROTATED] else y
            else:
                weight = tl.full((BLOCK, BLOCKS), tl.load(weights_ptr + peer), tl.float32)
                total = total + weight * y if own_ptr is None else tl.fma(y, weight, total)
    return restore(total, signs_ptr) + 0.0 if FORM[ROTATED] and weights_ptr is not None else total


@triton.jit
def land(
    x_ptr, row_ptr, signs_ptr, row_bytes, header_at, shard, shards, rank, ranks, n, length, good, largest,
    DECODE, WORD, FORM, BLOCK, BLOCKS, WIDE, EXACT, SUM: tl.constexpr, own_ptr=None, heard_ptr=None, weights_ptr=None,
):  # fmt: skip
    """Store a shard in x: a packed row, or if SUM the sum or mean of all rows; NaN unless `good`.

    Return the maximum of `largest`, if that is not None, and the bits of magnitudes (BLOCK, BLOCKS).
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    for MASKED in tl.static_range(2):
        begin, end = tiles_of(n, length, shards, BLOCK * BLOCKS, MASKED)
        for tile in range(begin, end, tl.num_programs(0)):
            WIDTH: tl.constexpr = 1 if MASKED else WIDE
            block, at, inside, present = place_of(tile, shard, n, length, FORM, BLOCK, BLOCKS, MASKED)
            if good:
                if SUM:
                    values = summed(
                        own_ptr, row_ptr, row_bytes, heard_ptr, weights_ptr, signs_ptr, header_at, rank, ranks, n,
                        block, at, inside, DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH,
                        -1.0 if EXACT or weights_ptr is None else 1.0,
                    )  # fmt: skip
                    if weights_ptr is None and not EXACT:
                        values = tl.div_rn(values, tl.zeros_like(values) + ranks)
                else:
                    values = fetched(row_ptr, header_at, n, block, at, inside, DECODE, WORD, FORM, BLOCK, MASKED, WIDTH)
                    values = restore(values, signs_ptr) if FORM[ROTATED] else values
                store_tile(x_ptr + shard * n, values, block, at, present, MASKED, WIDTH, BLOCK)
                if largest is not None:  # magnitudes keep their order as integers, and NaN
                    bits = rounded(values, dtype).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
                    largest = tl.maximum(largest, tl.where(present, bits, 0) if MASKED else bits)
            else:
                NAN: tl.constexpr = float("nan") if tl.constexpr(dtype.is_floating()) else -1  # the bits of one
                nan = tl.full((BLOCK, BLOCKS), NAN, dtype)
                store_tile(x_ptr + shard * n, nan, block, at, present, MASKED, WIDTH, BLOCK)
    if largest is not None:
        return largest
