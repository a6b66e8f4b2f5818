"""The GPU kernels of the operations in `definition.py`. They round in the same order, so they give the same bytes.

A program holds a tile of whole blocks: tile `first + program % tiles` of row `program // tiles`. Each column of the
tile is a block. If possible, Triton gives whole columns to a thread, so that sums and exchanges within a block stay in
registers. Full tiles (`tiled` of `kernels/gpu.py`) need no masks.

`tiles_gpu.py` has the functions of a tile, and says what a format is to a kernel.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..gpu import INTERPRETED, PORTABLE, byte_of, launch, load, restore, rotate, rounded, signed, store, tiled
from ..noise import seed_words
from ..rotation import signs_of
from .format import PLANES, Format, twin_of
from .tiles_gpu import BITS, ROTATED, averaged, load_values, locate, store_values, values_at


@triton.jit(
    do_not_specialize=["n", "first", "tiles", "seed", "seed_high"], do_not_specialize_on_alignment=["packed_ptr"]
)
def compress_kernel(
    x_ptr, residual_ptr, packed_ptr, stride, signs_ptr, row_bytes, header_at, n, first, tiles, seed, seed_high,
    MEASURE: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, WORD: tl.constexpr, FORM: tl.constexpr,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block, at, inside = locate(first + tl.program_id(0) % tiles, n, FORM, BLOCK, BLOCKS, MASKED)
    x = load(values_at(x_ptr + row * stride, at, WIDTH, NARROW), inside if MASKED else None).to(tl.float32)
    coded = rotate(x, signs_ptr) if FORM[ROTATED] else x
    values = store_values(
        packed_ptr + row * row_bytes, header_at, coded, None, row * n, seed, seed_high, n, block, at, inside,
        MEASURE, ENCODE, None, DECODE, WORD, FORM, DRAWN, BLOCK, MASKED, WIDTH,
    )  # fmt: skip
    if residual_ptr is not None:
        lost = x - (restore(values, signs_ptr) if FORM[ROTATED] else values)
        store(values_at(residual_ptr + row * stride, at, WIDTH, NARROW), lost, inside if MASKED else None)


@triton.jit(do_not_specialize=["n", "first", "tiles"], do_not_specialize_on_alignment=["packed_ptr", "ok_ptr"])
def decompress_kernel(
    out_ptr, packed_ptr, ok_ptr, stride, signs_ptr, row_bytes, header_at, n, first, tiles,
    DECODE: tl.constexpr, WORD: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    block, at, inside = locate(first + tl.program_id(0) % tiles, n, FORM, BLOCK, BLOCKS, MASKED)
    row_ptr = packed_ptr + row * row_bytes
    values = load_values(row_ptr, header_at, n, block, DECODE, WORD, FORM, BLOCK, MASKED, WIDTH)
    if FORM[ROTATED]:
        values = restore(values, signs_ptr)
    store(values_at(out_ptr + row * stride, at, WIDTH, NARROW), values, inside if MASKED else None)
    if ok_ptr is not None:  # nearly always nothing is stored
        finite = tl.abs(rounded(values, out_ptr.dtype.element_ty).to(tl.float32)) < float("inf")
        of_block = tl.min((finite | ~inside if MASKED else finite).to(tl.int32), 0)
        tl.store(ok_ptr + tl.zeros_like(of_block), 0, of_block == 0)


@triton.jit(do_not_specialize=["rows", "n", "first", "tiles"], do_not_specialize_on_alignment=["packed_ptr"])
def add_kernel(
    out_ptr, packed_ptr, weights_ptr, rows, signs_ptr, row_bytes, header_at, n, first, tiles,
    DECODE: tl.constexpr, WORD: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    block, at, inside = locate(first + tl.program_id(0), n, FORM, BLOCK, BLOCKS, MASKED)
    out_at = values_at(out_ptr, at, WIDTH, NARROW)
    begun = load(out_at, inside if MASKED else None).to(tl.float32)
    total = tl.zeros_like(begun) if FORM[ROTATED] else begun
    for _ in tl.range(rows, loop_unroll_factor=1 if MASKED else 4):
        total += tl.load(weights_ptr) * load_values(
            packed_ptr, header_at, n, block, DECODE, WORD, FORM, BLOCK, MASKED, WIDTH
        )
        packed_ptr += row_bytes
        weights_ptr += 1
    if FORM[ROTATED]:
        total = begun + restore(total, signs_ptr)
    store(out_at, total, inside if MASKED else None)


@triton.jit(
    do_not_specialize=["rows", "n", "first", "tiles", "seed", "seed_high"],
    do_not_specialize_on_alignment=["packed_ptr", "ok_ptr"],
)
def reduce_kernel(
    sent_ptr, residual_ptr, packed_ptr, ok_ptr, rows, signs_ptr, row_bytes, header_at, n, first, tiles, seed, seed_high,
    ADD_UP: tl.constexpr, MEASURE: tl.constexpr, ENCODE: tl.constexpr, JOIN: tl.constexpr, DECODE: tl.constexpr,
    WORD: tl.constexpr, FORM: tl.constexpr, DRAWN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    MASKED: tl.constexpr, WIDTH: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    if ok_ptr is not None:
        tl.store(ok_ptr, 1, first + tl.program_id(0) == 0)
    block, at, inside = locate(first + tl.program_id(0), n, FORM, BLOCK, BLOCKS, MASKED)
    mean, plain = averaged(
        packed_ptr, rows, row_bytes, header_at, n, block, inside,
        ADD_UP, DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH,
    )  # fmt: skip
    EARLY: tl.constexpr = residual_ptr is not None and (FORM[BITS] <= 2 and not FORM[ROTATED])
    if EARLY:  # before what takes long; but others need the registers
        begun = load(values_at(residual_ptr, at, WIDTH, NARROW), inside if MASKED else None)
    values = store_values(
        sent_ptr, header_at, mean, plain, 0, seed, seed_high, n, block, at, inside,
        MEASURE, ENCODE, JOIN, DECODE, WORD, FORM, DRAWN, BLOCK, MASKED, WIDTH,
    )  # fmt: skip
    if residual_ptr is not None:
        lost = restore(mean - values, signs_ptr) if FORM[ROTATED] else mean - values
        residual_at = values_at(residual_ptr, at, WIDTH, NARROW)
        if not EARLY:
            begun = load(residual_at, inside if MASKED else None)
        store(residual_at, begun + lost * tl.cast(rows, tl.float32), inside if MASKED else None)


# The functions below launch the operations of `definition.py`, with the same arguments. They let the compiler fuse no
# multiplication with an addition, which would round once where the definition rounds twice.

# TILES is the number of values of a tile. A warp takes WARP values, so that each thread has eight 16-byte loads of fp32
# in flight. Kernels that compute the range of a block have one warp, so that blocks of up to 1024 values wait for no
# other warp. Kernels that only stream have two warps: 32 programs then fill a multiprocessor. If a byte holds several
# codes, all kernels have one warp, because a thread can then hold all values whose codes it reads.
WARP = 1024
TILES = {compress_kernel: WARP, decompress_kernel: 2 * WARP, add_kernel: 2 * WARP, reduce_kernel: WARP}
# The limit of registers per thread of averages of two bits: with a smaller one, some GPU spills. With this one, an H100
# needs 96, and a multiprocessor holds 21 programs in place of 16.
REGISTERS = 112
WORDS = {1: tl.uint8, 4: tl.uint32, 8: tl.uint64}  # by the bytes of a header


def compress(format: Format, x: Tensor, block: int, residual: Tensor | None = None, key: int | None = None) -> Tensor:
    packed = format.layout(x.shape[1], block).empty(len(x), x.device)
    arguments = x.contiguous(), residual, packed, _stride(x.shape)
    _launch(compress_kernel, format, x.shape, block, x.itemsize, arguments, **_draws(key))
    return packed


def decompress_(format: Format, out: Tensor, packed: Tensor, block: int, ok: Tensor | None = None) -> None:
    arguments = out, _aligned(packed), byte_of(ok), _stride(out.shape)
    _launch(decompress_kernel, format, out.shape, block, out.itemsize, arguments)


def add_(format: Format, out: Tensor, packed: Tensor, weights: Tensor, block: int) -> None:
    arguments = out, _aligned(packed), weights, _count(packed)
    _launch(add_kernel, format, (1, len(out)), block, out.itemsize, arguments)


def reduce(
    format: Format, packed: Tensor, n: int, block: int, residual: Tensor | None = None, key: int | None = None,
    ok: Tensor | None = None,
) -> Tensor:  # fmt: skip
    sent = format.layout(n, block).empty(1, packed.device)
    arguments = sent, residual, _aligned(packed), byte_of(ok), _count(packed)
    _launch(reduce_kernel, format, (1, n), block, 1 if residual is None else 4, arguments, **_draws(key))
    return sent


def _launch(
    kernel: Any, format: Format, shape: Sequence[int], block: int, itemsize: int, arguments: Sequence[Any], **draws: Any
) -> None:
    """Launch a kernel on values of shape (rows, n), of `itemsize` bytes each."""
    (rows, n), layout = shape, format.layout(shape[1], block)
    signs = signs_of(block, arguments[0].device) if format.rotated else None
    drawn, anywhere = draws.get("DRAWN", False), rows > 1 and not all(map(_begins_well, arguments[:2]))
    for first, tiles, options in _tiles(kernel, format, n, block, itemsize, 1 if anywhere else _stride(shape), drawn):
        placed = signs, layout.row, layout.header_at, n, first, tiles
        launch(kernel, rows * tiles, *arguments, *placed, **draws, **options)


@lru_cache(maxsize=1024)  # the lengths of a model's buckets are few
def _tiles(
    kernel: Any, format: Format, n: int, block: int, itemsize: int, stride: int, drawn: bool
) -> list[tuple[int, int, dict[str, Any]]]:
    """Return (first tile, number of tiles, options) of each launch over a row."""
    return [
        (first, tiles, options_of(kernel, format, block, itemsize, masked, stride, drawn))
        for first, tiles, masked in tiled(n, tile_of(kernel, format, block, joins(kernel, format, itemsize, drawn)))
    ]


def joins(kernel: Any, format: Format, itemsize: int, drawn: bool) -> bool:
    """Return whether a kernel writes whole words of codes: of few bits, on a grid about zero, that nobody decodes."""
    few = format.bits == 1 or (format.bits == 2 and format.rotated)
    return kernel is reduce_kernel and few and itemsize == 1 and not drawn


def tile_of(kernel: Any, format: Format, block: int, joined: bool) -> int:
    if joined and format.bits == 1:
        return max(block, 2 * WARP) // block * block  # a thread loads little, and takes part in headers
    return max(block, TILES[kernel] if format.bits == 8 and not format.rotated else WARP) // block * block


def options_of(
    kernel: Any, format: Format, block: int, itemsize: int, masked: bool, stride: int, drawn: bool
) -> dict[str, Any]:
    """Return a kernel's constants and options for values of `itemsize` bytes, in rows `stride` values apart."""
    module, joined = twin_of(format), joins(kernel, format, itemsize, drawn)
    tile, warp = (
        tile_of(kernel, format, block, joined),
        2 * WARP if joined and not masked and format.bits == 1 else WARP,
    )
    form = format.bits, format.padded, format.rotated, *format.numbers
    device = {"MEASURE": module.measure, "ENCODE": module.encode, "DECODE": module.decode, "FORM": form}
    device["ADD_UP"] = module.add_up if format.bits in (1, 2, 4) and not masked else None
    device["JOIN"] = module.join_words if joined and not masked else None
    device |= {"WORD": WORDS[format.header_bytes], "BLOCK": block, "BLOCKS": tile // block, "MASKED": masked}
    width = min(16 // itemsize, PLANES[format.bits][0] * warp // 256)  # a thread's part of what a warp of 32 holds
    # Masked values move one by one. A row begins at a multiple of the stride, which limits the alignment of the row.
    device |= {"WIDTH": 1 if masked else gcd(width, stride), "NARROW": masked or stride % 16 != 0}
    constants = {name: value for name, value in device.items() if name in kernel.arg_names}
    few = {"maxnreg": REGISTERS} if device["JOIN"] is not None and format.bits == 2 and not PORTABLE.value else {}
    return constants | few | {"num_warps": max(1, tile // warp), "enable_fp_fusion": False}


def _aligned(packed: Tensor) -> Tensor:
    return packed if _begins_well(packed) else packed.clone()


def _begins_well(x: Tensor | None) -> bool:
    return x is None or x.data_ptr() % 16 == 0


def _count(packed: Tensor) -> Any:
    # The interpreter of Triton 3.6 takes only constants, no arguments, as the bound of a loop.
    return tl.constexpr(len(packed)) if INTERPRETED.value else len(packed)


def _stride(shape: Sequence[int]) -> int:
    # A single row begins at the tensor's address. So its stride is given as zero, which does not limit the alignment.
    return shape[1] if shape[0] > 1 else 0


def _draws(key: int | None) -> dict[str, Any]:
    return dict(zip(("seed", "seed_high"), signed(seed_words(key or 0)), strict=True), DRAWN=key is not None)
