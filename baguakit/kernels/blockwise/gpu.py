"""The kernels of the operations of `blockwise.py`: the same roundings in the same order, so the same bytes.

A program holds a tile of whole blocks, a block to a line. Only tiles that reach past the end of their row have masks,
so that all others move whole lines of memory.

A format is five constants of the kernels, where a block's header is one unsigned integer, a word:

    MEASURE(x, inside, width, MASKED, DRAWN) -> words and scales (blocks,)     `inside` tells which values are there,
                                                                               and `width` how many; others are zero
    ENCODE(x, word, scale, draw) -> codes (blocks, width) as uint8             `draw` is None where nothing is drawn
    DECODE(codes, word) -> values
    WORD, the type of a header, and STRIPES, how many codes share a byte.
"""

# What Triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ..shared.noise_gpu import uniform
from ..shared.rounding_gpu import rounded

# Codes in bytes, as `join` and `split` of `layout.py`.


@triton.jit
def join(codes, STRIPES: tl.constexpr):
    if STRIPES == 1:
        joined = codes
    else:
        shift = (tl.arange(0, STRIPES) * (8 // STRIPES)).to(tl.uint8)
        striped = tl.reshape(codes, (codes.shape[0], STRIPES, codes.shape[1] // STRIPES))
        joined = tl.sum(striped << shift[None, :, None], 1).to(tl.uint8)
    return joined


@triton.jit
def split(joined, STRIPES: tl.constexpr):
    if STRIPES == 1:
        codes = joined
    else:
        shift = (tl.arange(0, STRIPES) * (8 // STRIPES)).to(tl.uint8)
        striped = (joined[:, None, :] >> shift[None, :, None]) & ((1 << (8 // STRIPES)) - 1)
        codes = tl.reshape(striped, (joined.shape[0], STRIPES * joined.shape[1]))
    return codes


# Moving a tile. Where nothing is masked, all masks are true and none is read.


@triton.jit
def locate(tile, n, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STRIPES: tl.constexpr, MASKED: tl.constexpr):
    """The number of each block of the tile; the columns of its values, and which are there; and its bytes likewise."""
    block = tile.to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    place, byte = tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK // STRIPES)[None, :]
    width = tl.minimum(tl.maximum(n - block * BLOCK, 0), BLOCK)[:, None]
    stripe = (width + (STRIPES - 1)) // STRIPES
    if MASKED and STRIPES > 1:  # the stripes of the last block are shorter
        in_stripe = place % (BLOCK // STRIPES)
        place = place // (BLOCK // STRIPES) * stripe + in_stripe
        inside = (in_stripe < stripe) & (place < width)
    else:
        inside = place < width
    return block, block[:, None] * BLOCK + place, inside, block[:, None] * (BLOCK // STRIPES) + byte, byte < stripe


@triton.jit
def codes_at(row_ptr, at, WIDTH: tl.constexpr):
    # `packed_ptr` is not specialized on its alignment, so that this is all that Triton knows and a thread holds WIDTH
    # bytes. With 16 codes to a thread, each access of a warp to the values they come from would touch a part of every
    # line it needs, and of none the whole.
    return tl.multiple_of(row_ptr + at, [WIDTH, WIDTH])


@triton.jit
def load(ptr, inside, MASKED: tl.constexpr):
    return tl.load(ptr, inside, 0) if MASKED else tl.load(ptr)


@triton.jit
def store(ptr, value, inside, MASKED: tl.constexpr):
    tl.store(ptr, rounded(value, ptr.dtype.element_ty), inside if MASKED else None)


@triton.jit
def word_of(row_ptr, header_at, block, WORD: tl.constexpr):
    return (row_ptr + header_at + block * (WORD.primitive_bitwidth // 8)).to(tl.pointer_type(WORD))


@triton.jit
def load_values(
    row_ptr, header_at, n, block, byte, some_bytes,
    DECODE: tl.constexpr, WORD: tl.constexpr, STRIPES: tl.constexpr,
    BLOCK: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    word = load(word_of(row_ptr, header_at, block, WORD), block * BLOCK < n, MASKED)
    codes = split(load(codes_at(row_ptr, byte, WIDTH), some_bytes, MASKED), STRIPES)
    return DECODE(codes, word)


@triton.jit
def store_values(
    row_ptr, header_at, x, origin, seed, seed_high, n, block, at, inside, byte, some_bytes,
    MEASURE: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, WORD: tl.constexpr, STRIPES: tl.constexpr,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantize and store a tile, and return what it lost."""
    width = tl.minimum(tl.maximum(n - block * BLOCK, 1), BLOCK) if MASKED else BLOCK
    word, scale = MEASURE(x, inside, width, MASKED, DRAWN)
    codes = ENCODE(x, word, scale, uniform(origin + at, seed, seed_high) if DRAWN else None)
    if MASKED:
        codes = tl.where(inside, codes, 0)
    store(codes_at(row_ptr, byte, WIDTH), join(codes, STRIPES), some_bytes, MASKED)
    store(word_of(row_ptr, header_at, block, WORD), word, block * BLOCK < n, MASKED)
    return x - DECODE(codes, word)


# The kernels. A program takes tile `first + program % tiles` of row `program // tiles`.


@triton.jit(
    do_not_specialize=["n", "first", "tiles", "seed", "seed_high"], do_not_specialize_on_alignment=["packed_ptr"]
)
def compress_kernel(
    x_ptr, residual_ptr, packed_ptr, stride, row_bytes, header_at, n, first, tiles, seed, seed_high,
    MEASURE: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, WORD: tl.constexpr, STRIPES: tl.constexpr,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = first + tl.program_id(0) % tiles
    block, at, inside, byte, some_bytes = locate(tile, n, BLOCK, BLOCKS, STRIPES, MASKED)
    x = load(x_ptr + row * stride + at, inside, MASKED).to(tl.float32)
    lost = store_values(
        packed_ptr + row * row_bytes, header_at, x, row * n, seed, seed_high, n, block, at, inside, byte, some_bytes,
        MEASURE, ENCODE, DECODE, WORD, STRIPES, DRAWN, BLOCK, MASKED, WIDTH,
    )  # fmt: skip
    if residual_ptr is not None:
        store(residual_ptr + row * stride + at, lost, inside, MASKED)


@triton.jit(do_not_specialize=["n", "first", "tiles"], do_not_specialize_on_alignment=["packed_ptr"])
def decompress_kernel(
    out_ptr, packed_ptr, stride, row_bytes, header_at, n, first, tiles,
    DECODE: tl.constexpr, WORD: tl.constexpr, STRIPES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // tiles).to(tl.int64)
    tile = first + tl.program_id(0) % tiles
    block, at, inside, byte, some_bytes = locate(tile, n, BLOCK, BLOCKS, STRIPES, MASKED)
    row_ptr = packed_ptr + row * row_bytes
    values = load_values(row_ptr, header_at, n, block, byte, some_bytes, DECODE, WORD, STRIPES, BLOCK, MASKED, WIDTH)
    store(out_ptr + row * stride + at, values, inside, MASKED)


@triton.jit(do_not_specialize=["rows", "n", "first", "tiles"], do_not_specialize_on_alignment=["packed_ptr"])
def add_kernel(
    out_ptr, packed_ptr, weights_ptr, rows, row_bytes, header_at, n, first, tiles,
    DECODE: tl.constexpr, WORD: tl.constexpr, STRIPES: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block, at, inside, byte, some_bytes = locate(first + tl.program_id(0), n, BLOCK, BLOCKS, STRIPES, MASKED)
    total = load(out_ptr + at, inside, MASKED).to(tl.float32)
    for _ in tl.range(rows, loop_unroll_factor=1 if MASKED else 4):
        total += tl.load(weights_ptr) * load_values(
            packed_ptr, header_at, n, block, byte, some_bytes, DECODE, WORD, STRIPES, BLOCK, MASKED, WIDTH
        )
        packed_ptr += row_bytes
        weights_ptr += 1
    store(out_ptr + at, total, inside, MASKED)


@triton.jit(
    do_not_specialize=["rows", "n", "first", "tiles", "seed", "seed_high"],
    do_not_specialize_on_alignment=["packed_ptr"],
)
def reduce_kernel(
    sent_ptr, residual_ptr, packed_ptr, rows, row_bytes, header_at, n, first, tiles, seed, seed_high,
    MEASURE: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, WORD: tl.constexpr, STRIPES: tl.constexpr,
    DRAWN: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    block, at, inside, byte, some_bytes = locate(first + tl.program_id(0), n, BLOCK, BLOCKS, STRIPES, MASKED)
    total, count = tl.zeros((BLOCKS, BLOCK), tl.float32), 0.0
    for _ in tl.range(rows, loop_unroll_factor=1 if MASKED else 4):
        total += load_values(
            packed_ptr, header_at, n, block, byte, some_bytes, DECODE, WORD, STRIPES, BLOCK, MASKED, WIDTH
        )
        packed_ptr += row_bytes
        count += 1
    mean = tl.div_rn(total, count)
    if MASKED:
        mean = tl.where(inside, mean, 0.0)  # code 0 need not mean 0
    lost = store_values(
        sent_ptr, header_at, mean, 0, seed, seed_high, n, block, at, inside, byte, some_bytes,
        MEASURE, ENCODE, DECODE, WORD, STRIPES, DRAWN, BLOCK, MASKED, WIDTH,
    )  # fmt: skip
    if residual_ptr is not None:
        store(residual_ptr + at, load(residual_ptr + at, inside, MASKED) + lost * count, inside, MASKED)
