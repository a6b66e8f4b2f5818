"""The mean over the ranks of a node in one kernel, bit for bit that of `primitives.compressed_mean_` or `mean_`.

In two hops, with shards of n values:

    shard s of rank r       →  row r of the inbox of rank s               packed; after all of them a signal
    mean of the n rows      →  row s of the means of every rank           added in the order of ranks, packed; a signal
    row s of one's own      →  shard s of x                               unpacked

In one hop every rank packs all its values into a row of every inbox, and averages the rows of its own.

A CTA takes the same tiles of every shard, and waits for the same CTA of all ranks only.
"""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..gpu import byte_of, launch
from .tiles_gpu import LINE, Memory, Wire, all_heard, average, land, memory_of, send, tell_all


@triton.jit(
    do_not_specialize=["rank", "ranks", "length", "n", "limit"],
    do_not_specialize_on_alignment=["ok_ptr", "counters_ptr", "control_ptr"],
)
def mean_kernel(
    x_ptr, residual_ptr, ok_ptr, peers_ptr, counters_ptr, control_ptr, rank, ranks, half_bytes, limit,
    signs_ptr, row_bytes, header_at, length, n,
    ADD_UP: tl.constexpr, MEASURE: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, WORD: tl.constexpr,
    FORM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, NARROW: tl.constexpr,
    EXACT: tl.constexpr, ONE_HOP: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    cta = tl.program_id(0)
    if not NARROW:
        n = n // 16 * 16  # as it is: so Triton knows that shards are aligned as x is
    number = tl.load(counters_ptr + cta) + 1
    half = (number & 1).to(tl.int64) * half_bytes
    shards = 1 if ONE_HOP else ranks
    own_ptr, words_at = memory_of(peers_ptr, rank), 2 * tl.cast(half_bytes, tl.int64)
    factor = tl.div_rn(1.0, ranks.to(tl.float32)) if EXACT else None
    row_at, mean_at = half + tl.cast(rank, tl.int64) * row_bytes, half + tl.cast(ranks + rank, tl.int64) * row_bytes

    for step in range(shards):
        peer = (rank + 1 + step) % ranks
        send(
            x_ptr, residual_ptr, peers_ptr, peer, ranks if ONE_HOP else 1, ranks, row_at, signs_ptr, header_at,
            tl.cast(0 if ONE_HOP else peer, tl.int64), shards, n, length, factor,
            MEASURE, ENCODE, DECODE, WORD, FORM, BLOCK, BLOCKS, WIDTH,
        )  # fmt: skip
    tell_all(peers_ptr, words_at, 0, ranks, rank, number, THREADS)
    good = all_heard(own_ptr, words_at, 0, ranks, number, control_ptr, limit, THREADS)
    if not ONE_HOP:  # noqa: SIM102 a constant decides what is compiled
        if good:
            average(
                residual_ptr, peers_ptr, own_ptr + half, mean_at, signs_ptr, row_bytes, header_at,
                tl.cast(rank, tl.int64), ranks, n, length,
                ADD_UP, MEASURE, ENCODE, DECODE, WORD, FORM, BLOCK, BLOCKS, WIDTH, EXACT,
            )  # fmt: skip
            tell_all(peers_ptr, words_at, 1, ranks, rank, number, THREADS)
            good = all_heard(own_ptr, words_at, 1, ranks, number, control_ptr, limit, THREADS)

    largest = tl.zeros((BLOCK, BLOCKS), tl.int32)
    for place in range(shards):
        shard = tl.cast(place, tl.int64)
        row_ptr = own_ptr + half + (0 if ONE_HOP else (ranks + shard) * row_bytes)
        largest = land(
            x_ptr, row_ptr, signs_ptr, row_bytes, header_at, shard, shards, rank, ranks, n, length, good, largest,
            DECODE, WORD, FORM, BLOCK, BLOCKS, WIDTH, EXACT, ONE_HOP,
        )  # fmt: skip
    finite = tl.max(tl.reshape(largest, (BLOCK * BLOCKS,), can_reorder=True), 0) < 0x7F800000  # the bits of infinity
    tl.store(ok_ptr + cta, (good & finite).to(tl.uint8))
    tl.store(counters_ptr + cta, number)


def mean_(memory: Memory, wire: Wire, x: Tensor, residual: Tensor | None = None, one_hop: bool = False) -> Tensor:
    """Average the flat `x` over all ranks of a node, and return whether the values of each CTA are finite.

    Args:
        memory: with halves of two rows for each rank, or of one in one hop.
        wire: equal on all ranks.
        x: contiguous, with at least one value; overwritten.
        residual: fp32, contiguous, as long as `x`; overwritten as by `primitives.compressed_mean_`.

    Returns:
        A bool tensor (ctas,), False also of CTAs that gave up waiting: their values are NaN.

    Raises:
        ValueError: the memory is too small, or for exchanges between neighbours.
    """
    n, rows = len(x) if one_hop else -(-len(x) // memory.ranks), (1 if one_hop else 2) * memory.ranks
    signs, row, header_at = wire.arguments(n, x.device)
    memory.must_hold(f"a mean of {len(x):,} values", rows * row)
    stride = max(row, memory.half_bytes // rows // LINE * LINE)  # so that a warp's store of a line is one packet
    ok = torch.empty(memory.ctas, dtype=torch.bool, device=x.device)
    at_16 = not any(each.data_ptr() % 16 for each in (x, residual) if each is not None)
    launch(
        mean_kernel, memory.ctas, x, residual, byte_of(ok), memory.addresses, memory.counters, memory.control,
        memory.rank, memory.ranks, memory.half_bytes, memory.limit, signs, stride, header_at, len(x), n,
        ONE_HOP=one_hop, **wire.constants(n, x.itemsize, at_16),
    )  # fmt: skip
    return ok
