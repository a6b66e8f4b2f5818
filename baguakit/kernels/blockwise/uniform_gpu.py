"""The arithmetic of the formats of `uniform.py` for GPUs.

The word of a block is step | bottom << 32 if headers are wide (two fp32), else step | bottom << 16 (bf16 and int16).
"""

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from ..gpu import INTERPRETED, PORTABLE
from .tiles_gpu import BITS, ROTATED, word_of, words_at

SMALLEST, NAN, INFINITY = tl.constexpr(2.0**-126), tl.constexpr(float("nan")), tl.constexpr(float("inf"))
REACH, LARGEST, LARGEST_BF16 = tl.constexpr(32760.0), tl.constexpr(2.0**127), tl.constexpr(255 * 2.0**120)
INFINITY_BITS = tl.constexpr(0x7F800000)
SIXTEEN_BITS = tl.constexpr(0x47800000)  # those of 2^16
ORIGIN, ORIGIN_BITS = tl.constexpr(2.0**23), tl.constexpr(0x4B000000)
TWO, THREE = tl.constexpr(1.2479), tl.constexpr(0.7344)  # spacings


@triton.jit
def measure(x, inside, width, plain, MASKED, DRAWN, FORM):
    TOP: tl.constexpr = (1 << FORM[BITS]) - 1
    WIDE: tl.constexpr = FORM[BITS] == 8 and not FORM[ROTATED]
    if FORM[BITS] == 1 or (FORM[ROTATED] and FORM[BITS] <= 3 and not DRAWN):  # a grid about zero
        if DRAWN:
            size, broken = tl.max(tl.abs(x), 0), tl.max((x - x != 0).to(tl.int32), 0) != 0  # max drops NaN
        else:
            if plain is None:
                size, broken = mean_magnitude(x, width, MASKED, FORM)
            elif plain:  # no sum of magnitudes rounds, and each is a whole multiple of the unit of their mean
                size = tl.sum(tl.abs(x), 0) * (1.0 / width)
                broken = size != size
            else:
                size, broken = mean_magnitude(x, width, MASKED, FORM)
        step = size * (2.0 if DRAWN or FORM[BITS] == 1 else TWO if FORM[BITS] == 2 else THREE)
        step = bf16_above(tl.minimum(tl.maximum(step, SMALLEST), LARGEST))
        scale, step = tl.where(size == 0, 0.0, tl.div_rn(1.0, step)), tl.where(size == 0, 0.0, step)
        bottom = tl.zeros_like(step) - TOP
    else:
        low, high, broken = extremes(x, inside, MASKED)
        step = tl.div_rn(high * 0.5 - low * 0.5, (TOP - 1) / 2 if DRAWN else TOP / 2)
        if WIDE:
            equal = (low == high) & (high != 0)
            step = tl.where(equal, high, tl.maximum(step, SMALLEST))
            scale = tl.where(equal, 0.0, tl.div_rn(1.0, step))
        else:
            reach = tl.div_rn(tl.maximum(tl.abs(low), tl.abs(high)), REACH / 2 if FORM[ROTATED] else REACH)
            step = bf16_above(tl.minimum(tl.maximum(tl.maximum(reach, step), SMALLEST), LARGEST_BF16))
            scale = tl.div_rn(1.0, step)
        level = tl.where(tl.abs(low * scale) < SMALLEST, 0.0, low * scale)
        bottom = tl.floor(level if DRAWN else level + 0.5) * (2 if FORM[ROTATED] else 1)
        if WIDE:
            bottom = tl.where(equal, 1.0, bottom)
    step, bottom = tl.where(broken, NAN, step).to(tl.uint32, bitcast=True), tl.where(broken, 0.0, bottom)
    if WIDE:
        word = step.to(tl.uint64) | bottom.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    else:
        word = step >> 16 | bottom.to(tl.int32).to(tl.uint32, bitcast=True) << 16
    return word, tl.where(broken, NAN, scale)


@triton.jit
def extremes(x, inside, MASKED):
    """Return each block's minimum, its maximum (NaN if a value is NaN), and whether a value is not finite."""
    low = tl.min(tl.where(inside, x, INFINITY) if MASKED else x, 0)
    x = tl.where(inside, x, -INFINITY) if MASKED else x
    if INTERPRETED:  # it reduces by functions of ours only slowly
        high = tl.where(tl.max((x != x).to(tl.int32), 0) != 0, NAN, tl.max(x, 0))
    else:
        high = tl.reduce(x, 0, higher)
    if MASKED:
        empty = low > high
        low, high = tl.where(empty, 0.0, low), tl.where(empty, 0.0, high)
    return low, high, (low - low != 0) | (high - high != 0)


@triton.jit
def higher(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def mean_magnitude(x, width, MASKED, FORM):
    """Return the mean |x| of each block, and whether a value of the block is not finite."""
    if FORM[ROTATED] and not INTERPRETED:
        top = tl.reduce(tl.abs(x), 0, higher).to(tl.int32, bitcast=True)
    else:  # as integers, magnitudes keep their order, and NaN; those of bf16 are two in a word
        top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    field = tl.minimum(tl.maximum(top >> 23, 30), 254)
    unit, units = ((field - 16) << 23).to(tl.float32, bitcast=True), ((270 - field) << 23).to(tl.float32, bitcast=True)
    total = tl.sum((tl.abs(x) * units[None, :]).to(tl.int32), 0).to(tl.float32)
    # The width of a whole block is a power of two: multiplication by its inverse is exact.
    mean = tl.div_rn(total, tl.zeros_like(unit) + width) if MASKED else total * (1.0 / width)
    return mean * unit, top >= INFINITY_BITS


@triton.jit
def bf16_above(x):
    return ((x.to(tl.uint32, bitcast=True) + 0xFFFF) & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def encode(x, word, scale, draw, FORM):
    TOP: tl.constexpr = (1 << FORM[BITS]) - 1
    ABOUT_ZERO: tl.constexpr = FORM[BITS] == 1 or (FORM[ROTATED] and FORM[BITS] <= 3 and draw is None)
    if ABOUT_ZERO and draw is None:
        step = parts_of(word, FORM)[0]
        keep = tl.where(step == step, TOP, 0).to(tl.uint32)[None, :]
        if FORM[BITS] == 1:
            return tl.where(x >= 0, keep, 0).to(tl.uint8)
        # The number of steps that are larger than |x|; of values that are not negative, TOP minus that. Signs of
        # differences need no predicates, of which a thread has seven.
        below = tl.zeros(x.shape, tl.uint32)
        for k in tl.static_range(1, 1 << (FORM[BITS] - 1)):
            below += beyond(x, (k * step)[None, :]).to(tl.uint32, bitcast=True) >> 31
        negative = ((x + 0.0).to(tl.int32, bitcast=True) >> 31).to(tl.uint32, bitcast=True)  # the sum is not -0
        return equal_bits(below, negative, keep).to(tl.uint8)
    else:
        level = x * scale[None, :]
        if draw is not None:
            if ABOUT_ZERO:
                level += TOP / 2
            below = tl.floor(level)
            level = below + (level - below > draw).to(tl.float32)
        else:
            level = tl.floor(level + 0.5)
        if INTERPRETED:  # whose maximum is NaN where one is
            level = tl.where(level == level, level, 0.0)
        if draw is None and not (FORM[BITS] == 8 and not FORM[ROTATED]):
            # Integers: a GPU rounds as it converts, and subtracts as it clamps. No value is below the bottom.
            bottom = (word.to(tl.int32, bitcast=True) >> (17 if FORM[ROTATED] else 16))[None, :]
            return tl.minimum(level.to(tl.int32) - bottom, TOP).to(tl.uint8)
        if not ABOUT_ZERO:
            level -= parts_of(word, FORM)[1][None, :]
        return tl.minimum(tl.maximum(level, 0.0), TOP).to(tl.uint8)


@triton.jit
def join_words(x, word, FORM):
    """Return the words of codes of whole blocks about zero, of one or two bits, rounded to nearest. No x is -0."""
    step = parts_of(word, FORM)[0]
    keep = tl.where(step == step, 0xFFFFFFFF, 0).to(tl.uint32)[None, :]
    if FORM[BITS] == 1:
        return (signs_in_words(x, 1, 0) ^ 0xFFFFFFFF) & keep
    else:
        negative, below = signs_in_words(x, 2, 1), signs_in_words(beyond(x, step[None, :]), 2, 0)
        return (negative ^ (negative >> 1) ^ below ^ 0xFFFFFFFF) & keep


@triton.jit
def beyond(x, step):
    """Return |x| - step."""
    if PORTABLE:
        return tl.abs(x) - step
    else:  # an instruction takes a magnitude, but LLVM finds those of `measure` and keeps them in registers
        CODE: tl.constexpr = "{ .reg .f32 %a; abs.f32 %a, $1; sub.f32 $0, %a, $2; }"
        return tl.inline_asm_elementwise(CODE, "=f,f,f", [x, step], tl.float32, True, 1)


@triton.jit
def equal_bits(x, y, mask):
    """Return the bits of a mask where those of x and y are equal."""
    if PORTABLE:
        return (x ^ y ^ 0xFFFFFFFF) & mask
    else:  # LLVM inverts y before what y is computed by
        CODE: tl.constexpr = "lop3.b32 $0, $1, $2, $3, 0x82;"
        return tl.inline_asm_elementwise(CODE, "=r,r,r,r", [x, y, mask], tl.uint32, True, 1)


@triton.jit
def signs_in_words(x, PLANE: tl.constexpr, PLACE: tl.constexpr):
    """Return words of codes, of which only the bit at a place is set: the sign of its value."""
    # Four values, one for each byte of a word, become four bytes of signs.
    parts = tl.reshape(x.to(tl.uint32, bitcast=True), (8 // PLANE, x.shape[0] * PLANE // 32, 2, 2, x.shape[1]))
    even, odd = tl.split(tl.permute(parts, (0, 1, 4, 2, 3)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    signs = chosen(chosen(a, b, 0xFB), chosen(c, d, 0xFB), 0x5410)
    place = tl.arange(0, 8 // PLANE) * PLANE + PLACE
    return tl.sum(signs & (0x01010101 << place).to(tl.uint32)[:, None, None], 0)


@triton.jit
def decode(codes, word, FORM):
    step, bottom = parts_of(word, FORM)
    if FORM[BITS] == 1:  # half a step with a sign
        below = (step * -0.5).to(tl.uint32, bitcast=True)
        return (below[None, :] ^ codes.to(tl.uint32) << 31).to(tl.float32, bitcast=True)
    elif FORM[BITS] == 8 and not FORM[ROTATED]:
        return (codes.to(tl.float32) + bottom[None, :]) * step[None, :]
    else:
        # The bits of 2²³ + code (with halves: 2²² + code) need no conversion. bottom − 2²³ is exact: |bottom| < 2¹⁵.
        HALVES: tl.constexpr = FORM[ROTATED]
        shifted = ((codes.to(tl.uint32) << 1) | 0x4A800000) if HALVES else (codes.to(tl.uint32) | 0x4B000000)
        origin = bottom - (4194304.0 if HALVES else 8388608.0)
        return (shifted.to(tl.float32, bitcast=True) + origin[None, :]) * step[None, :]


# The sum of rows. In units of a power of two, steps are integers of at most 16 bits. One instruction (dp2a) adds to a
# total the products of two rows' steps with two bytes. So the bytes of two rows are put in turn into words, and codes
# are masked where they are in half a byte: the total is 2^place times the sum of codes times steps. Bottoms are added
# last.


@triton.jit
def add_up(packed_ptr, rows, factor, row_bytes, header_at, block, FORM, BLOCK, WIDTH):
    """Return the sum of rows of whole blocks times `factor`, a power of two.

    Also return whether this is exact, and whether no sum of the results' magnitudes rounds.
    """
    PLANE: tl.constexpr = FORM[BITS]
    WORDS: tl.constexpr = BLOCK * PLANE // 32
    BLOCKS: tl.constexpr = block.shape[0]
    at = words_at(packed_ptr, block, FORM, BLOCK, WIDTH)
    codes = eight_of(at, 0, rows, row_bytes)  # before what waits for headers
    word = words_of(packed_ptr, 0, rows, row_bytes, header_at, block)
    unit, scale, base, reach = units_of(word, packed_ptr, rows, row_bytes, header_at, block, FORM)
    # One total for each byte of a word. Their bits are those of 2^23 + total, which need no conversion.
    a = tl.full((8 // PLANE, WORDS, BLOCKS), ORIGIN_BITS, tl.uint32)
    a, b, c, d = add_eight((a, a, a, a), codes, word, scale, FORM, BLOCK)
    for first in tl.range(8, rows, 8):
        codes = eight_of(at, first, rows, row_bytes)
        word = words_of(packed_ptr, first, rows, row_bytes, header_at, block)
        a, b, c, d = add_eight((a, b, c, d), codes, word, scale, FORM, BLOCK)
    total = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (0, 1, 4, 3, 2)).to(tl.float32, bitcast=True)
    place = (tl.arange(0, 8 // PLANE) * PLANE & 3)[:, None]
    lowered = (unit * factor)[None, :] * ((127 - place) << 23).to(tl.float32, bitcast=True)
    start = (base * unit * factor)[None, :] - lowered * ORIGIN
    shape: tl.constexpr = (8 // PLANE, 1, 1, 1, BLOCKS)
    total = tl.fma(total, tl.reshape(lowered, shape), tl.reshape(start, shape))
    # Magnitudes have at most 17 digits; and units are so large that u of `uniform.py` is no larger.
    most = tl.where((unit >= 2.0**-80) | (reach == 0), reach, INFINITY) * max(BLOCK, 128)
    # What is not exact has a reach so large that sums of magnitudes round, too: one maximum tells both.
    doubt = tl.max((~(reach < ORIGIN / (16 // PLANE))).to(tl.int32) + (~(most < 16777216.0)).to(tl.int32))
    return tl.reshape(total, (BLOCK, BLOCKS)), doubt < 2, doubt == 0


@triton.jit
def eight_of(at, first, rows, row_bytes):
    """Return the words of eight rows. Beyond the last, they are those of the last."""
    at += tl.cast(first, tl.int64) * (row_bytes // 4)
    if rows - first >= 8:  # noqa: SIM108 - tuples; a row's place then is one sum
        words = each_of(at, row_bytes // 4, 7)
    else:
        words = each_of(at, row_bytes // 4, rows - 1 - first)
    return words


@triton.jit
def each_of(at, stride, last):
    words = ()
    for row in tl.static_range(8):
        words += (tl.load(at),)  # type: ignore[assignment]
        at += tl.where(row < last, stride, 0)
    return words


@triton.jit
def add_eight(totals, codes, word, scale, FORM, BLOCK):
    """Return the totals plus eight rows, given the words of their codes and their headers."""
    PLANE: tl.constexpr = FORM[BITS]
    BLOCKS: tl.constexpr = word.shape[1]
    shape: tl.constexpr = (1, BLOCK * PLANE // 32, BLOCKS)
    place = tl.arange(0, 8 // PLANE)[:, None, None] * PLANE
    mask = (((1 << PLANE) - 1) * 0x01010101 << (place & 3)).to(tl.uint32)
    units = tl.fma((word << 16).to(tl.float32, bitcast=True), scale[None, :], ORIGIN).to(tl.uint32, bitcast=True)
    even, odd = tl.split(tl.permute(tl.reshape(units, (2, 2, 2, BLOCKS)), (3, 0, 1, 2)))
    first, second = tl.split(chosen(even, odd, 0x5410))
    steps = tl.split(first), tl.split(second)
    a, b, c, d = totals
    for pair in tl.static_range(4):
        step = steps[pair % 2][pair // 2][None, None, :]
        low = tl.reshape(chosen(codes[2 * pair], codes[2 * pair + 1], 0x5140), shape) >> (place & 4) & mask
        high = tl.reshape(chosen(codes[2 * pair], codes[2 * pair + 1], 0x7362), shape) >> (place & 4) & mask
        a, b = products(step, low, a, False), products(step, low, b, True)
        c, d = products(step, high, c, False), products(step, high, d, True)
    return a, b, c, d


@triton.jit
def products(steps, codes, total, HIGH: tl.constexpr):
    """Return the total plus the products of two steps of 16 bits with the lower or the higher two bytes of codes."""
    if PORTABLE:
        codes = codes >> 16 if HIGH else codes
        return total + (steps & 0xFFFF) * (codes & 0xFF) + (steps >> 16) * (codes >> 8 & 0xFF)
    else:
        CODE: tl.constexpr = "dp2a.hi.u32.u32 $0, $1, $2, $3;" if HIGH else "dp2a.lo.u32.u32 $0, $1, $2, $3;"
        return tl.inline_asm_elementwise(CODE, "=r,r,r,r", [steps, codes, total], tl.uint32, True, 1)


@triton.jit
def chosen(x, y, BYTES: tl.constexpr):
    """Return four of the eight bytes of x and y, the lowest first: a digit of BYTES chooses each.

    If the digit has 8 added, the highest bit of the byte stands in all its places.
    """
    if PORTABLE:
        word = tl.zeros_like(x)
        for k in tl.static_range(4):
            byte = (y if BYTES >> 4 * k & 4 else x) >> 8 * (BYTES >> 4 * k & 3) & 0xFF
            word |= ((byte >> 7) * 0xFF if BYTES >> 4 * k & 8 else byte) << 8 * k
        return word
    else:
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, $3;", "=r,r,r,n", [x, y, BYTES], tl.uint32, True, 1)


@triton.jit
def units_of(word, packed_ptr, rows, row_bytes, header_at, block, FORM):
    """Return each block's unit, its inverse, the sum of bottoms times steps, and a bound of all sums, in units.

    The unit is a power of two that divides all steps, and their halves if bottoms have halves. The bound is infinite if
    a step has more than 16 bits.
    """
    least = least_of(word)
    for first in tl.range(8, rows, 8):
        least = tl.minimum(least, least_of(words_of(packed_ptr, first, rows, row_bytes, header_at, block)))
    DIGITS: tl.constexpr = 8 if FORM[ROTATED] or FORM[BITS] == 1 else 7  # of a step, after the first
    field = tl.minimum(tl.maximum((least >> 23).to(tl.int32) - DIGITS, 1), 230)  # sums of 2^23 units are finite
    unit, scale = (field << 23).to(tl.float32, bitcast=True), ((254 - field) << 23).to(tl.float32, bitcast=True)
    base, reach = reach_of(word, scale, FORM)
    for first in tl.range(8, rows, 8):
        more, further = reach_of(words_of(packed_ptr, first, rows, row_bytes, header_at, block), scale, FORM)
        base += more
        reach += further
    return unit, scale, base, reach


@triton.jit
def least_of(word):
    """Return the bits of each block's least step that is not zero."""
    step = word << 16
    return tl.min(tl.where(step == 0, INFINITY_BITS, step), 0)


@triton.jit
def reach_of(word, scale, FORM):
    """Return each block's sum of bottoms times steps in units, and a bound of the sum of rows, or infinity."""
    HALVES: tl.constexpr = FORM[ROTATED] or FORM[BITS] == 1
    SPAN: tl.constexpr = ((1 << FORM[BITS]) - 1) * (2 if HALVES else 1)  # of all codes
    step = (word << 16).to(tl.float32, bitcast=True) * scale[None, :]
    of_bottom = step * 0.5 if HALVES else step
    bottom = (word.to(tl.int32, bitcast=True) >> 16).to(tl.float32)
    most = tl.maximum(tl.abs(bottom), tl.abs(bottom + SPAN)) * of_bottom
    within = step.to(tl.uint32, bitcast=True) < SIXTEEN_BITS  # neither NaN nor negative
    fits = within & (tl.floor(of_bottom) == of_bottom)
    return tl.sum(bottom * of_bottom, 0), tl.sum(tl.where(fits, most, INFINITY), 0)


@triton.jit
def words_of(packed_ptr, first, rows, row_bytes, header_at, block):
    """Return the headers (8, blocks) of eight rows; 0 where there are fewer."""
    row = first + tl.arange(0, 8)[:, None]
    row_ptr = packed_ptr + row.to(tl.int64) * row_bytes
    return tl.load(word_of(row_ptr, header_at, block[None, :], tl.uint32), row < rows, 0)


@triton.jit
def parts_of(word, FORM):
    if FORM[BITS] == 8 and not FORM[ROTATED]:
        step, bottom = word.to(tl.uint32), (word >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        step, bottom = word << 16, (word.to(tl.int32, bitcast=True) >> 16).to(tl.float32)
    return step.to(tl.float32, bitcast=True), bottom * 0.5 if FORM[ROTATED] else bottom
