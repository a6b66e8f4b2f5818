"""The kernels of `definition.gradient_norm_`: a sum in two stages, always in the same order."""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..shared.gpu import on
from .gpu import G_AT, LENGTH, RECORD, TYPES, WHOLE, column, places
from .table import StepTables

TURN = 1024  # values that a program adds at a time


@triton.jit
def squares(record, tile, G: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, TURN: tl.constexpr):
    """Return the sum of a tile's squares, of `TURN` values at a time."""
    values, n = column(record, G_AT, G, WIDE), tl.load(record + LENGTH)
    LINE: tl.constexpr = TURN if WIDE else TURN // 2  # as in a step
    total = tl.zeros((TURN // LINE, LINE), tl.float64)
    for turn in tl.range(TILE // TURN):
        at = places(tile * (TILE // TURN) + turn, LINE, TURN)
        g = tl.load(values + at) if WIDE else tl.load(values + at, at < n, 0)
        wide = g.to(tl.float32).to(tl.float64)
        total += wide * wide
    return tl.sum(total)


@triton.jit
def partials_kernel(partials_ptr, tiles_ptr, records_ptr, G: tl.constexpr, TILE: tl.constexpr, TURN: tl.constexpr):
    entry = tl.load(tiles_ptr + tl.program_id(0))
    record = records_ptr + (entry >> 32) * RECORD
    tile = entry & 0xFFFFFFFF
    if tile < tl.load(record + WHOLE):
        total = squares(record, tile, G, True, TILE, TURN)
    else:
        total = squares(record, tile, G, False, TILE, TURN)
    tl.store(partials_ptr + tl.program_id(0), total)


@triton.jit(do_not_specialize=["count"])
def norm_kernel(norm_ptr, found_ptr, partials_ptr, count, TURN: tl.constexpr):
    total = tl.zeros((TURN,), tl.float64)
    for turn in tl.range((count + TURN - 1) // TURN):
        at = turn * TURN + tl.arange(0, TURN)
        total += tl.load(partials_ptr + at, at < count, 0)
    norm = tl.sqrt(tl.sum(total)).to(tl.float32)
    tl.store(norm_ptr, norm)
    if found_ptr is not None:
        tl.store(found_ptr, (norm - norm != 0).to(found_ptr.dtype.element_ty))


def gradient_norm_(norm: Tensor, tables: StepTables, found_inf: Tensor | None) -> None:
    """Write the norm of the gradients of the tables; and, in `found_inf`, 1 if it is not finite, else 0."""
    first = 0
    with on(tables.partials.device):
        for table in tables.by_kind:
            programs = len(table.tiles)
            if programs:
                partials_kernel[(programs,)](
                    tables.partials[first:], table.tiles, table.records, G=TYPES[table.kind[1]],
                    TILE=table.tile, TURN=TURN, num_warps=4, enable_fp_fusion=False,
                )  # fmt: skip
            first += programs
        norm_kernel[(1,)](norm, found_inf, tables.partials, first, TURN=4 * TURN, num_warps=8, enable_fp_fusion=False)
