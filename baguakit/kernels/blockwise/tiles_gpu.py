"""The functions of a tile of whole blocks, of which kernels are built: loaded, quantized, stored, and averaged.

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

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ..gpu import columns_at, in_blocks, in_columns, load, store, uniform

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
def bytes_at(row_ptr, n, block, PLANE, FORM, BLOCK, WIDTH, COLUMNS):
    """Return pointers to the bytes of one plane of a tile's codes, and a mask of the bytes that exist in the row."""
    if FORM[BITS] & -(2 * PLANE):  # planes of more bits come before
        blocks = (n.to(tl.int64) + (BLOCK - 1)) // BLOCK
        for before in tl.static_range(3):
            if 8 >> before > PLANE and FORM[BITS] & (8 >> before):
                row_ptr += (blocks * (BLOCK * (8 >> before) // 8) + 15) // 16 * 16
    STRIPES: tl.constexpr = 8 // PLANE
    # `packed_ptr` is not specialized on its alignment, so Triton uses only the hint below: a thread holds HELD bytes.
    # If it held 16 codes, each access of a warp to the values would touch parts of many cache lines, but no whole line.
    HELD: tl.constexpr = min(WIDTH, 4 * PLANE)
    if COLUMNS:
        return columns_at(row_ptr, block, HELD, BLOCK // STRIPES), 0
    else:
        width = tl.minimum(tl.maximum(n - block * BLOCK, 0), BLOCK)[None, :]
        stored = (width + (BLOCK - 1)) // BLOCK * BLOCK if FORM[PADDED] else width
        byte = tl.arange(0, BLOCK // STRIPES)[:, None]
        at = row_ptr + (block[None, :] * (BLOCK // STRIPES) + byte)
        return tl.multiple_of(at, [HELD, HELD]), byte < (stored + (STRIPES - 1)) // STRIPES


@triton.jit
def load_plane(row_ptr, n, block, PLANE, FORM, BLOCK, MASKED, WIDTH, COLUMNS):
    at, some = bytes_at(row_ptr, n, block, PLANE, FORM, BLOCK, WIDTH, COLUMNS)
    return split(in_blocks(load(at, some if MASKED else None)), PLANE) << (FORM[BITS] & -(2 * PLANE))


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
def load_values(row_ptr, header_at, n, block, DECODE, WORD, FORM, BLOCK, MASKED, WIDTH, COLUMNS=False):
    word = load(word_of(row_ptr, header_at, block, WORD), block * BLOCK < n if MASKED else None)
    LAST: tl.constexpr = FORM[BITS] & -FORM[BITS]
    codes = load_plane(row_ptr, n, block, LAST, FORM, BLOCK, MASKED, WIDTH, COLUMNS)
    for plane in tl.static_range(3):
        if FORM[BITS] & (8 >> plane) and 8 >> plane > LAST:
            codes |= load_plane(row_ptr, n, block, 8 >> plane, FORM, BLOCK, MASKED, WIDTH, COLUMNS)
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
def store_codes(row_ptr, header_at, codes, word, n, block, WORD, FORM, BLOCK, MASKED, WIDTH, COLUMNS=False):
    """Store the codes of a tile, plane by plane, and its headers. Without codes, store the headers only."""
    for plane in tl.static_range(4):
        if codes is not None and FORM[BITS] & (8 >> plane):
            part = codes
            if FORM[BITS] != 8 >> plane:
                part = (codes >> (FORM[BITS] & -(16 >> plane))) & ((1 << (8 >> plane)) - 1)
            at, some = bytes_at(row_ptr, n, block, 8 >> plane, FORM, BLOCK, WIDTH, COLUMNS)
            store(at, in_columns(join(part, 8 >> plane), at), some if MASKED else None)
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


@triton.jit
def add_one_by_one(
    packed_ptr, rows, row_bytes, header_at, n, block, DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH, COLUMNS
):  # fmt: skip
    total = tl.zeros((BLOCK, BLOCKS), tl.float32)
    for _ in tl.range(rows, loop_unroll_factor=1 if MASKED else 4):
        total += load_values(packed_ptr, header_at, n, block, DECODE, WORD, FORM, BLOCK, MASKED, WIDTH, COLUMNS)
        packed_ptr += row_bytes
    return total


@triton.jit
def averaged(
    packed_ptr, rows, row_bytes, header_at, n, block, inside,
    ADD_UP, DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH, COLUMNS=False,
):  # fmt: skip
    """Return the mean of a tile of rows, and whether it is known that no sum of its magnitudes rounds."""
    one = tl.full((1,), 1.0, tl.float32)
    count, even = one * rows, (rows & (rows - 1)) == 0
    # By a power of two, the product is the quotient; the exponent of the inverse is the negative one.
    factor = tl.where(even, (0x7F000000 - count.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True), one)
    if ADD_UP is None:
        plain: tl.constexpr = False
        mean = factor * add_one_by_one(
            packed_ptr, rows, row_bytes, header_at, n, block, DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH, COLUMNS
        )
    else:
        mean, exact, plain = ADD_UP(packed_ptr, rows, factor, row_bytes, header_at, block, FORM, BLOCK, WIDTH)
        plain &= even
        if not exact:
            mean = factor * add_one_by_one(
                packed_ptr, rows, row_bytes, header_at, n, block,
                DECODE, WORD, FORM, BLOCK, BLOCKS, MASKED, WIDTH, COLUMNS,
            )  # fmt: skip
    if not even:
        mean = tl.div_rn(mean, count)
    if MASKED and not FORM[PADDED]:
        mean = tl.where(inside, mean, 0.0)  # code 0 need not mean 0
    return mean, plain
