"""Integer arithmetic: PTX ISA, section 9.7.1 "Integer Arithmetic Instructions".

Sums and products are those of integers, their last bits: there is no saturation but that of `add.sat.s32` and
`sub.sat.s32`. Shorter types wrap as NumPy's do.
"""

import numpy as np

from ...numbers.types import SIGNED, UNSIGNED, width_of

TYPES = tuple(f"{sign}{width}" for width in (16, 32, 64) for sign in "us")
PAIRS = ("u16x2", "s16x2")


def _of_integers(modifiers):
    return bool(modifiers) and modifiers[-1] in (*TYPES, *PAIRS, "b16", "b32", "b64")


def _elementwise(function, count):
    """An instruction whose result is a function of `count` sources of its one type."""

    def decode(form):
        kind = form.kinds(1, TYPES + PAIRS)
        form.end(count + 1)
        if kind in PAIRS:
            return _in_parts(form, function, count, kind)
        reads, write = form.sources(1, count, kind), form.target(0, kind)
        return lambda frame, on: write(frame, on, function(*(read(frame, on) for read in reads)))

    return decode


def _in_parts(form, function, count, kind):
    reads, write = [form.packed(k, kind) for k in range(1, count + 1)], form.packed_target(0, kind)

    def action(frame, on):
        parts = zip(*(read(frame, on) for read in reads), strict=True)
        write(frame, on, [function(*each) for each in parts])

    return action


def _sum(sign):
    plain = _elementwise(np.add if sign > 0 else np.subtract, 2)

    def decode(form):
        if not form.flag("sat"):
            return plain(form)
        kind = form.kinds(1, ("s32",))
        form.end(3)
        (a, b), write = form.sources(1, 2, kind), form.target(0, kind)
        low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max

        def action(frame, on):
            exact = np.asarray(a(frame, on)).astype(np.int64) + sign * np.asarray(b(frame, on)).astype(np.int64)
            write(frame, on, np.clip(exact, low, high).astype(np.int32))

        return action

    return decode


def _product(summed):
    """`mul` and `mad`: the low or the high half of a product, or all of it, plus c if it is `mad`."""

    def decode(form):
        kind, half = form.kinds(1, TYPES), form.choice("lo", "hi", "wide")
        if half is None or (half == "wide" and width_of(kind) == 64):
            raise form.unknown("product of this type without .lo or .hi")
        form.end(4 if summed else 3)
        result = f"{kind[0]}{2 * width_of(kind)}" if half == "wide" else kind
        a, b = form.sources(1, 2, kind)
        c = form.source(3, result) if summed else None
        write, product = form.target(0, result), {"lo": np.multiply, "hi": high_half, "wide": wide_product}[half]

        def action(frame, on):
            value = product(a(frame, on), b(frame, on))
            write(frame, on, value if c is None else value + c(frame, on))

        return action

    return decode


def wide_product(a, b):
    """All bits of a product of up to 32 bits each."""
    table = SIGNED if a.dtype.kind == "i" else UNSIGNED
    wide = table[16 * a.dtype.itemsize]
    return a.astype(wide) * b.astype(wide)


def high_half(a, b):
    """The upper half of the bits of a product."""
    width = 8 * a.dtype.itemsize
    if width < 64:
        return (wide_product(a, b) >> wide_product(a, b).dtype.type(width)).astype(a.dtype)
    x, y, low = a.view(np.uint64), b.view(np.uint64), np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    (x1, x0), (y1, y0) = (x >> half, x & low), (y >> half, y & low)
    middle = x1 * y0 + ((x0 * y0) >> half)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":  # a negative a counts as a + 2⁶⁴ above
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def divided(a, b):
    """The quotient, rounded toward zero. Of division by zero the manual says nothing: all bits are set."""
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // np.maximum(b, a.dtype.type(1)))
    quotient = (_magnitude(a) // np.maximum(_magnitude(b), UNSIGNED[8 * a.dtype.itemsize](1))).view(a.dtype)
    return np.where(b == 0, a.dtype.type(-1), np.where((a < 0) != (b < 0), -quotient, quotient))


def remainder(a, b):
    """The rest of a division: it has the sign of a."""
    return a - divided(a, b) * b


def _magnitude(a):
    return np.where(a < 0, -a, a).view(UNSIGNED[8 * a.dtype.itemsize])


def _dp2a(form):
    """`dp2a d, a, b, c`: c plus the halves of a, each times one of two bytes of b: the lower two, or the higher."""
    form.kinds(2, ("u32",))
    first = {"lo": 0, "hi": 2}[form.choice("lo", "hi", default="lo")]
    form.end(4)
    (a, b, c), write = form.sources(1, 3, "u32"), form.target(0, "u32")

    def action(frame, on):
        halves, bytes_, total = [np.asarray(read(frame, on)) for read in (a, b, c)]
        for k in range(2):
            byte = (bytes_ >> np.uint32(8 * (first + k))) & np.uint32(0xFF)
            total = total + ((halves >> np.uint32(16 * k)) & np.uint32(0xFFFF)) * byte
        write(frame, on, total)

    return action


def _signed_only(function):
    decode_all = _elementwise(function, 1)

    def decode(form):
        if form.instruction.modifiers[-1][0] != "s":
            raise form.unknown("unsigned form of it")
        return decode_all(form)

    return decode


DECODERS = {
    "add": (_of_integers, _sum(1)),
    "sub": (_of_integers, _sum(-1)),
    "mul": (_of_integers, _product(False)),
    "mad": (_of_integers, _product(True)),
    "dp2a": (_of_integers, _dp2a),
    "div": (_of_integers, _elementwise(divided, 2)),
    "rem": (_of_integers, _elementwise(remainder, 2)),
    "abs": (_of_integers, _signed_only(np.abs)),
    "neg": (_of_integers, _signed_only(np.negative)),
    "min": (_of_integers, _elementwise(np.minimum, 2)),
    "max": (_of_integers, _elementwise(np.maximum, 2)),
}
