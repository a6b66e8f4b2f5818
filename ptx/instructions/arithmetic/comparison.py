"""Comparison and selection: PTX ISA, sections 9.7.6 "Comparison and Selection Instructions" and 9.7.7, of halves."""

import numpy as np

from ...numbers.types import PACKED, flushed, is_float

COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
COMBINATIONS = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
TYPES = (*(f"{letter}{width}" for letter in "bus" for width in (16, 32, 64)), "f32", "f64", "f16", "bf16")
PAIRS = ("f16x2", "bf16x2")


def _any_type(modifiers):
    return True


def _comparison(name, kind):
    """Return a function of two values, or None if the type has no such comparison.

    Of floats the plain ones are false if one is NaN, those with a u behind them true; `num` and `nan` ask for that.
    """
    if is_float(kind):
        if name in ("num", "nan"):
            broken = _either_is_nan
            return broken if name == "nan" else lambda a, b: ~broken(a, b)
        if name in COMPARISONS:
            ordered = COMPARISONS[name]
            # NumPy's are false with NaN, except not_equal.
            return (lambda a, b: (a < b) | (a > b)) if name == "ne" else ordered
        if name[:-1] in COMPARISONS and name[-1] == "u":
            unordered = COMPARISONS[name[:-1]]
            return lambda a, b: unordered(a, b) | _either_is_nan(a, b)
        return None
    if kind[0] == "u" and name in UNSIGNED_NAMES:
        return COMPARISONS[UNSIGNED_NAMES[name]]
    if kind[0] == "b" and name not in ("eq", "ne"):
        return None
    return COMPARISONS.get(name)


def _either_is_nan(a, b):
    return np.isnan(a) | np.isnan(b)


def _setp(form):
    """`setp.op.type p|q, a, b`: whether it holds, and whether it does not. Of packed halves, p of the lower, q of the
    upper. With `.and`, `.or` or `.xor`, each combined with predicate c."""
    kind, flush = form.kinds(1, TYPES + PAIRS), form.flag("ftz")
    combination = form.choice(*COMBINATIONS)
    if not form.modifiers:
        raise form.unknown("form of it without a comparison")
    name = form.modifiers.pop(0)
    part = PACKED.get(kind, kind)
    compare = _comparison(name, part)
    if compare is None or (flush and kind != "f32"):
        raise form.unknown(f"comparison .{name} of .{kind}")
    form.end(4 if combination else 3)
    holds, fails = (form.target(each, "pred") for each in form.pair(0))
    joined = COMBINATIONS[combination] if combination else None
    third = form.source(3, "pred") if combination else None
    packed = kind in PACKED
    sources = [form.packed(k, kind) if packed else form.source(k, kind) for k in (1, 2)]

    def action(frame, on):
        a, b = (read(frame, on) for read in sources)
        if flush:
            a, b = flushed(a), flushed(b)
        results = [compare(x, y) for x, y in zip(a, b, strict=True)] if packed else [compare(a, b)]
        results = results if packed else [results[0], ~results[0]]
        if joined:
            other = third(frame, on)
            results = [joined(each, other) for each in results]
        holds(frame, on, results[0])
        fails(frame, on, results[1])

    return action


def _selp(form):
    """`selp.type d, a, b, c`: a where c holds, else b; the bits as they are."""
    kind = form.kinds(1, (*TYPES[:-2],))
    form.end(4)
    (a, b), chosen, write = form.sources(1, 2, kind), form.source(3, "pred"), form.target(0, kind)
    return lambda frame, on: write(frame, on, np.where(chosen(frame, on), a(frame, on), b(frame, on)))


DECODERS = {"setp": (_any_type, _setp), "selp": (_any_type, _selp)}
