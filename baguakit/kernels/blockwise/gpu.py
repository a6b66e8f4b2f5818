"""The GPU kernels of the operations in `definition.py`. They round in the same order, so they give the same bytes.

A program holds a tile of whole blocks: tile `first + program % tiles` of row `program // tiles`. Each column of the
tile is a block. If possible, Triton gives whole columns to a thread, so that sums and exchanges within a block stay in
registers. Full tiles (`tiled` of `kernels/gpu.py`) need no masks.

A kernel takes a format as three functions and two constants. The header of a block is one unsigned integer, its word:

    MEASURE(x, inside, width, plain, MASKED, DRAWN, FORM) -> words and scales (blocks,)
    ENCODE(x, word, scale, draw, FORM) -> codes (width, blocks) as uint8
    DECODE(codes, word, FORM) -> values

Formats of 1, 2 and 4 bits have one more function, for the sum of rows in whole tiles, and those of 1 and 2 bits
another, for the words of codes of their average (`uniform_gpu.py`).

`inside` is a mask of the values that exist, and `width` is their number; all other values are 0. `plain` says whether
no sum of magnitudes rounds in fp32, and is None where nobody knows. `draw` is None to round to nearest. WORD is the
dtype of a word. FORM has the bits of a code, whether the last block is padded, whether blocks are rotated, and further
numbers that the functions need.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import Any

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..gpu import INTERPRETED, PORTABLE, byte_of, launch, load, restore, rotate, rounded, signed, store, tiled, uniform
from ..noise import seed_words
from ..rotation import signs_of
from .format import PLANES, Format, twin_of

BITS, PADDED, ROTATED = (tl.constexpr(place) for place in range(3))  # of FORM

# `join` packs the codes of one plane to bytes, and `split` unpacks them. `format.py` does so for all planes.


@triton.jit
def join(codes, PLANE):
    if PLANE == 8:
        return codes
    else:
        shift = (tl.arange(0, 8 // PLANE) * PLANE).to(tl.uint8)
        striped = tl.reshape(codes, (8 // PLANE, codes.shape[0] // (8 // PLANE), codes.shape[1]))
        return tl.sum(striped << shift[:, None, None], 0).to(tl.uint8)


@triton.jit
def split(joined, PLANE):
    if PLANE == 8:
        return joined
    else:
        shift = (tl.arange(0, 8 // PLANE) * PLANE).to(tl.uint32)
        striped = (joined.to(tl.uint32)[None, :, :] >> shift[:, None, None]) & ((1 << PLANE) - 1)
        return tl.reshape(striped, (8 // PLANE * joined.shape[0], joined.shape[1]))


@triton.jit
def bytes_at(row_ptr, n, block, PLANE, FORM, BLOCK, WIDTH):
    """Return pointers to the bytes of one plane of a tile's codes, and a mask of the bytes that exist in the row."""
    if FORM[BITS] & -(2 * PLANE):  # planes of more bits come before
        blocks = (n.to(tl.int64) + (BLOCK - 1)) // BLOCK
        for before in tl.static_range(3):
            if 8 >> before > PLANE and FORM[BITS] & (8 >> before):
                row_ptr += (blocks * (BLOCK * (8 >> before) // 8) + 15) // 16 * 16
    STRIPES: tl.constexpr = 8 // PLANE
    width = tl.minimum(tl.maximum(n - block * BLOCK, 0), BLOCK)[None, :]
    stored = (width + (BLOCK - 1)) // BLOCK * BLOCK if FORM[PADDED] else width
    byte = tl.arange(0, BLOCK // STRIPES)[:, None]
    at = row_ptr + (block[None, :] * (BLOCK // STRIPES) + byte)
    # `packed_ptr` is not specialized on its alignment, so Triton uses only the hint below: a thread holds HELD bytes.
    # If it held 16 codes, each access of a warp to the values would touch parts of many cache lines, but no whole line.
    HELD: tl.constexpr = min(WIDTH, 4 * PLANE)
    return tl.multiple_of(at, [HELD, HELD]), byte < (stored + (STRIPES - 1)) // STRIPES


@triton.jit
def load_plane(row_ptr, n, block, PLANE, FORM, BLOCK, MASKED, WIDTH):
    at, some = bytes_at(row_ptr, n, block, PLANE, FORM, BLOCK, WIDTH)
    return split(load(at, some if MASKED else None), PLANE) << (FORM[BITS] & -(2 * PLANE))


@triton.jit
def words_at(row_ptr, block, FORM, BLOCK, WIDTH):
    """Return pointers to the codes of whole blocks, 32 bits at a time."""
    WORDS: tl.constexpr = BLOCK * FORM[BITS] // 32
    HELD: tl.constexpr = max(WIDTH, 16 if FORM[BITS] == 4 else 4)  # bytes of a thread
    at = row_ptr.to(tl.pointer_type(tl.uint32)) + (block[None, :] * WORDS + tl.arange(0, WORDS)[:, None])
    return tl.multiple_of(at, [HELD, HELD])


@triton.jit
def locate(tile, n, FORM, BLOCK, BLOCKS, MASKED):
    """Return the index of each block of a tile, the positions of its values (BLOCK, BLOCKS), and whether they exist."""
    block = tile.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    place = tl.arange(0, BLOCK)[:, None]
    width = tl.minimum(tl.maximum(n - block * BLOCK, 0), BLOCK)[None, :]
    if MASKED and FORM[BITS] < 8 and not FORM[PADDED]:  # the stripes of the last block are shorter
        STRIPES: tl.constexpr = 8 // FORM[BITS]
        stripe = (width + (STRIPES - 1)) // STRIPES
        in_stripe = place % (BLOCK // STRIPES)
        place = place // (BLOCK // STRIPES) * stripe + in_stripe
        inside = (in_stripe < stripe) & (place < width)
    else:
        inside = place < width
    return block, block[None, :] * BLOCK + place, inside


@triton.jit
def values_at(row_ptr, at, WIDTH, NARROW):
    # Triton gives a thread as many adjacent values as the widest access of the kernel might take. A narrower access of
    # a warp would then touch parts of many cache lines. A smaller multiple_of prevents this.
    ptr = row_ptr + at
    if NARROW:
        BYTES: tl.constexpr = WIDTH * (row_ptr.dtype.element_ty.primitive_bitwidth // 8)
        ptr = tl.multiple_of(ptr, [BYTES, BYTES])
    return ptr


@triton.jit
def word_of(row_ptr, header_at, block, WORD):
    return (row_ptr + header_at + block * (WORD.primitive_bitwidth // 8)).to(tl.pointer_type(WORD))


@triton.jit
def load_values(row_ptr, header_at, n, block, DECODE, WORD, FORM, BLOCK, MASKED, WIDTH):
    word = load(word_of(row_ptr, header_at, block, WORD), block * BLOCK < n if MASKED else None)
    LAST: tl.constexpr = FORM[BITS] & -FORM[BITS]
    codes = load_plane(row_ptr, n, block, LAST, FORM, BLOCK, MASKED, WIDTH)
    for plane in tl.static_range(3):
        if FORM[BITS] & (8 >> plane) and 8 >> plane > LAST:
            codes |= load_plane(row_ptr, n, block, 8 >> plane, FORM, BLOCK, MASKED, WIDTH)
    return DECODE(codes, word, FORM)


@triton.jit
def quantized(x, plain, draw, n, block, inside, MEASURE, ENCODE, FORM, BLOCK, MASKED):
    """Return the codes and the headers of a tile."""
    CUT: tl.constexpr = MASKED and not FORM[PADDED]
    width = tl.minimum(tl.maximum(n - block * BLOCK, 1), BLOCK) if CUT else BLOCK
    word, scale = MEASURE(x, inside, width, plain, CUT, draw is not None, FORM)
    codes = ENCODE(x, word, scale, draw, FORM)
    return tl.where(inside, codes, 0) if CUT else codes, word


@triton.jit
def store_codes(row_ptr, header_at, codes, word, n, block, WORD, FORM, BLOCK, MASKED, WIDTH):
    """Store the codes of a tile, plane by plane, and its headers. Without codes, store the headers only."""
    for plane in tl.static_range(4):
        if codes is not None and FORM[BITS] & (8 >> plane):
            part = codes
            if FORM[BITS] != 8 >> plane:
                part = (codes >> (FORM[BITS] & -(16 >> plane))) & ((1 << (8 >> plane)) - 1)
            at, some = bytes_at(row_ptr, n, block, 8 >> plane, FORM, BLOCK, WIDTH)
            store(at, join(part, 8 >> plane), some if MASKED else None)
    store(word_of(row_ptr, header_at, block, WORD), word, block * BLOCK < n if MASKED else None)


@triton.jit
def store_values(
    row_ptr, header_at, x, plain, origin, seed, seed_high, n, block, at, inside,
    MEASURE, ENCODE, JOIN, DECODE, WORD, FORM, DRAWN, BLOCK, MASKED, WIDTH,
):  # fmt: skip
    """Quantize and store a tile, and return the values that it decodes to."""
    draw = uniform(origin + at, seed, seed_high) if DRAWN else None
    codes, word = quantized(x, plain, draw, n, block, inside, MEASURE, ENCODE, FORM, BLOCK, MASKED)
    if JOIN is not None:
        tl.store(words_at(row_ptr, block, FORM, BLOCK, WIDTH), JOIN(x, word, FORM))
    store_codes(row_ptr, header_at, codes if JOIN is None else None, word, n, block, WORD, FORM, BLOCK, MASKED, WIDTH)
    return DECODE(codes, word, FORM)


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


@triton.jit
def add_one_by_one(
    packed_ptr, rows, row_bytes, header_at, n, block, DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH
):  # fmt: skip
    total = tl.zeros((BLOCK, BLOCKS), tl.float32)
    for _ in tl.range(rows, loop_unroll_factor=1 if MASKED else 4):
        total += load_values(packed_ptr, header_at, n, block, DECODE, WORD, FORM, BLOCK, MASKED, WIDTH)
        packed_ptr += row_bytes
    return total


@triton.jit
def averaged(
    packed_ptr, rows, row_bytes, header_at, n, block, inside,
    ADD_UP, DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH,
):  # fmt: skip
    """Return the mean of a tile of rows, and whether it is known that no sum of its magnitudes rounds."""
    one = tl.full((1,), 1.0, tl.float32)
    count, even = one * rows, (rows & (rows - 1)) == 0
    # By a power of two, the product is the quotient; the exponent of the inverse is the negative one.
    factor = tl.where(even, (0x7F000000 - count.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True), one)
    if ADD_UP is None:
        plain: tl.constexpr = False
        mean = factor * add_one_by_one(
            packed_ptr, rows, row_bytes, header_at, n, block, DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH
        )
    else:
        mean, exact, plain = ADD_UP(packed_ptr, rows, factor, row_bytes, header_at, block, FORM, BLOCK, WIDTH)
        plain &= even
        if not exact:
            mean = factor * add_one_by_one(
                packed_ptr, rows, row_bytes, header_at, n, block, DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH
            )
    if not even:
        mean = tl.div_rn(mean, count)
    if MASKED and not FORM[PADDED]:
        mean = tl.where(inside, mean, 0.0)  # code 0 need not mean 0
    return mean, plain


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
