"""Integers as strings of bits: PTX ISA, section 9.7.1: popc, clz, bfind, brev, bfe, bfi; and 9.7.9 prmt."""

import numpy as np

from ...numbers.types import UNSIGNED, width_of


def _any_type(modifiers):
    return True


def _counting(function):
    """An instruction that counts bits of its source; the result is of 32 bits."""

    def decode(form):
        kind = form.kinds(1, ("b32", "b64"))
        form.end(2)
        read, write = form.source(1, kind), form.target(0, "u32")
        return lambda frame, on: write(frame, on, function(np.asarray(read(frame, on))).astype(np.uint32))

    return decode


def ones(x):
    """The number of bits that are set: added up in pairs, fours, and so on."""
    width = 8 * x.dtype.itemsize
    total, shift = x, 1
    while shift < width:
        mask = x.dtype.type(sum(((1 << shift) - 1) << k for k in range(0, width, 2 * shift)))
        total = (total & mask) + ((total >> x.dtype.type(shift)) & mask)
        shift *= 2
    return total


def leading_zeros(x):
    """The number of zeros above the highest bit that is set: fill what is below it, and count the rest."""
    shift = 1
    while shift < 8 * x.dtype.itemsize:
        x = x | (x >> x.dtype.type(shift))
        shift *= 2
    return ones(~x)


def reversed_bits(x):
    width = 8 * x.dtype.itemsize
    shift = width // 2
    while shift:
        low = x.dtype.type(sum(((1 << shift) - 1) << k for k in range(0, width, 2 * shift)))
        by = x.dtype.type(shift)
        x = ((x >> by) & low) | ((x & low) << by)
        shift //= 2
    return x


def _brev(form):
    kind = form.kinds(1, ("b32", "b64"))
    form.end(2)
    read, write = form.source(1, kind), form.target(0, kind)
    return lambda frame, on: write(frame, on, reversed_bits(np.asarray(read(frame, on))))


def low_bits(count, width):
    """Integers of which the lowest `count` bits are set; all, if it is `width` or more."""
    dtype = UNSIGNED[width]
    count = np.asarray(count)
    partial = (dtype(1) << np.minimum(count, width - 1).astype(dtype)) - dtype(1)
    return np.where(count >= width, ~dtype(0), partial)


def shifted_right(x, count):
    """x >> count, where bits of any count may be asked for: zero from the width on."""
    width = 8 * x.dtype.itemsize
    return np.where(count >= width, x.dtype.type(0), x >> np.minimum(count, width - 1).astype(x.dtype))


def shifted_left(x, count):
    width = 8 * x.dtype.itemsize
    return np.where(count >= width, x.dtype.type(0), x << np.minimum(count, width - 1).astype(x.dtype))


def _bfe(form):
    """`bfe d, a, b, c`: of a, the c bits from bit b on; of a signed type, filled with the topmost of them.

    b and c count by their last eight bits. What lies above the topmost bit of a is zero, or, of a signed type, that
    bit.
    """
    kind = form.kinds(1, ("u32", "s32", "u64", "s64"))
    form.end(4)
    width, signed = width_of(kind), kind[0] == "s"
    raw = f"b{width}"
    a, write = form.source(1, raw), form.target(0, raw)
    start, length = form.sources(2, 2, "u32")

    def action(frame, on):
        x, place, count = (np.asarray(read(frame, on)) for read in (a, start, length))
        place, count = place & np.uint32(0xFF), count & np.uint32(0xFF)
        field = shifted_right(x, place) & low_bits(count, width)
        if signed:
            top = np.minimum(place.astype(np.int64) + count - 1, width - 1)
            sign = (count > 0) & (shifted_right(x, np.maximum(top, 0)) & x.dtype.type(1) != 0)
            kept = np.clip(width - place.astype(np.int64), 0, count)
            field = np.where(sign, field | ~low_bits(kept, width), field)
        write(frame, on, field)

    return action


def _bfi(form):
    """`bfi f, a, b, c, d`: b, in which the d bits from bit c on are replaced by the lowest of a."""
    kind = form.kinds(1, ("b32", "b64"))
    form.end(5)
    width = width_of(kind)
    (a, b), write = form.sources(1, 2, kind), form.target(0, kind)
    start, length = form.sources(3, 2, "u32")

    def action(frame, on):
        x, y, place, count = (np.asarray(read(frame, on)) for read in (a, b, start, length))
        place, count = place & np.uint32(0xFF), count & np.uint32(0xFF)
        mask = shifted_left(low_bits(count, width), place)
        write(frame, on, (y & ~mask) | (shifted_left(x, place) & mask))

    return action


def _bfind(form):
    """The place of the highest bit that is set; of a negative number, that is not set; all bits set if there is none.

    With `.shiftamt`, how far it must be shifted left to come to the top.
    """
    kind, amount = form.kinds(1, ("u32", "s32", "u64", "s64")), form.flag("shiftamt")
    form.end(2)
    width = width_of(kind)
    read, write = form.source(1, kind), form.target(0, "u32")

    def action(frame, on):
        x = np.asarray(read(frame, on))
        raw = np.where(x < 0, ~x, x).view(UNSIGNED[width])
        zeros = leading_zeros(raw).astype(np.int64)
        place = zeros if amount else width - 1 - zeros
        write(frame, on, np.where(raw == 0, -1, place).astype(np.uint32))

    return action


def _prmt(form):
    """`prmt d, a, b, c`: each byte of d is one of the eight of b:a, by four bits of c.

    With the highest of the four, it is that byte's sign eight times.
    """
    form.kinds(1, ("b32",))
    form.end(4)
    a, b, chosen = form.sources(1, 3, "b32")
    write = form.target(0, "b32")

    def action(frame, on):
        x, y, selector = (np.asarray(read(frame, on)) for read in (a, b, chosen))
        result = np.uint32(0)
        for k in range(4):
            choice = (selector >> np.uint32(4 * k)) & np.uint32(0xF)
            shift = (choice & np.uint32(3)) << np.uint32(3)
            byte = (np.where(choice & np.uint32(4) != 0, y, x) >> shift) & np.uint32(0xFF)
            sign = np.where(byte & np.uint32(0x80) != 0, np.uint32(0xFF), np.uint32(0))
            byte = np.where(choice & np.uint32(8) != 0, sign, byte)
            result = result | (byte << np.uint32(8 * k))
        write(frame, on, result)

    return action


DECODERS = {
    "popc": (_any_type, _counting(ones)),
    "clz": (_any_type, _counting(leading_zeros)),
    "brev": (_any_type, _brev),
    "bfe": (_any_type, _bfe),
    "bfi": (_any_type, _bfi),
    "bfind": (_any_type, _bfind),
    "prmt": (_any_type, _prmt),
}
