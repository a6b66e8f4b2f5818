"""Logic and shifts: PTX ISA, section 9.7.8 "Logic and Shift Instructions"."""

import numpy as np

from ...numbers.types import width_of
from .bits import shifted_left, shifted_right

TYPES = ("b16", "b32", "b64")


def _any_type(modifiers):
    return True


def _elementwise(function, count):
    def decode(form):
        kind = form.kinds(1, (*TYPES, "pred"))
        form.end(count + 1)
        reads, write = form.sources(1, count, kind), form.target(0, kind)
        return lambda frame, on: write(frame, on, function(*(read(frame, on) for read in reads)))

    return decode


def _cnot(form):
    """`cnot`: 1 where the source is 0, else 0."""
    kind = form.kinds(1, TYPES)
    form.end(2)
    read, write = form.source(1, kind), form.target(0, kind)

    def action(frame, on):
        value = np.asarray(read(frame, on))
        write(frame, on, (value == 0).astype(value.dtype))

    return action


def _lop3(form):
    """`lop3 d, a, b, c, table`: bit by bit, the bit of the table at 4 a + 2 b + c."""
    kind = form.kinds(1, ("b32",))
    form.end(5)
    reads, write = form.sources(1, 3, kind), form.target(0, kind)
    table = getattr(form.operands[4], "value", None)
    if table is None or not 0 <= table <= 255:
        raise form.unknown("table that is no constant of eight bits")

    def action(frame, on):
        a, b, c = (np.asarray(read(frame, on)) for read in reads)
        result = a & ~a
        for row in range(8):
            if table >> row & 1:
                result = result | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
        write(frame, on, result)

    return action


def _shl(form):
    """Shifts by the width or more, too: zeros are left."""
    kind = form.kinds(1, TYPES)
    form.end(3)
    read, count, write = form.source(1, kind), form.source(2, "u32"), form.target(0, kind)
    return lambda frame, on: write(frame, on, shifted_left(np.asarray(read(frame, on)), count(frame, on)))


def _shr(form):
    """Of a signed type its sign comes in from the left, of another zeros."""
    kind = form.kinds(1, (*TYPES, "u16", "u32", "u64", "s16", "s32", "s64"))
    form.end(3)
    read, count, write = form.source(1, kind), form.source(2, "u32"), form.target(0, kind)
    width = width_of(kind)

    def signed(frame, on):
        value = np.asarray(read(frame, on))
        write(frame, on, value >> np.minimum(count(frame, on), width - 1).astype(value.dtype))

    def unsigned(frame, on):
        write(frame, on, shifted_right(np.asarray(read(frame, on)), count(frame, on)))

    return signed if kind[0] == "s" else unsigned


def _shf(form):
    """The funnel shift `shf d, a, b, c`: b:a shifted left, its upper half; or right, its lower half.

    By c, `.clamp`ed to 32 or `.wrap`ped: its last five bits.
    """
    kind, side, limit = form.kinds(1, ("b32",)), form.choice("l", "r"), form.choice("wrap", "clamp")
    if side is None or limit is None:
        raise form.unknown("form of it without direction and limit")
    form.end(4)
    low, high = form.sources(1, 2, kind)
    count, write = form.source(3, "u32"), form.target(0, kind)

    def action(frame, on):
        by = np.asarray(count(frame, on))
        by = (by & np.uint32(31) if limit == "wrap" else np.minimum(by, np.uint32(32))).astype(np.uint64)
        both = np.asarray(low(frame, on)).astype(np.uint64) | (
            np.asarray(high(frame, on)).astype(np.uint64) << np.uint64(32)
        )
        moved = (both << by) >> np.uint64(32) if side == "l" else both >> by
        write(frame, on, moved.astype(np.uint32))

    return action


DECODERS = {
    "and": (_any_type, _elementwise(np.bitwise_and, 2)),
    "or": (_any_type, _elementwise(np.bitwise_or, 2)),
    "xor": (_any_type, _elementwise(np.bitwise_xor, 2)),
    "not": (_any_type, _elementwise(np.bitwise_not, 1)),
    "cnot": (_any_type, _cnot),
    "lop3": (_any_type, _lop3),
    "shl": (_any_type, _shl),
    "shr": (_any_type, _shr),
    "shf": (_any_type, _shf),
}
