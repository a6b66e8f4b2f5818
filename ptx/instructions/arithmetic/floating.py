"""Floating-point arithmetic: PTX ISA, sections 9.7.3 "Floating Point Instructions", 9.7.4 "Half Precision Floating
Point Instructions" and 9.7.5 "Mixed Precision Floating Point Instructions".

All are rounded as IEEE 754 says: to nearest, or in fp32 as `.rz`, `.rm` and `.rp` say. Subnormals are kept, unless
`.ftz` flushes those of sources and results. A NaN of fp32 is "unspecified": here always 0x7fffffff. In fp64 a source's
NaN is passed on, with its quiet bit set. Approximations have a file of their own.

`add`, `sub` and `mul` that state no rounding may be fused with one another by the assembler; they are executed as .rn.
"""

import numpy as np

from ...numbers import rounding
from ...numbers.types import (
    HALVES,
    MADE_NAN,
    PACKED,
    flushed,
    quiet,
    saturated,
    width_of,
)

MODES = ("rn", "rz", "rm", "rp")
TYPES = ("f32", "f64", *HALVES)
PAIRS = ("f32x2", "f16x2", "bf16x2")


def _of_floats(modifiers):
    return bool(modifiers) and modifiers[-1] in TYPES + PAIRS


def _rounding(form, default="rn"):
    """Take the rounding and the other modifiers of arithmetic; return what wraps a function of one type.

    The function takes sources and a mode.
    """
    mode = form.choice(*MODES, default=default)
    flush, saturate = form.flag("ftz"), form.flag("sat")

    def wrapped(function, kind):
        if mode is None:
            raise form.unknown("form of it without rounding")
        if (mode != "rn" and kind != "f32") or (flush and kind != "f32") or (saturate and kind == "f64"):
            raise form.unknown(f"such rounding of .{kind}")

        def calculate(*sources):
            if flush:
                sources = [flushed(each) for each in sources]
            result = np.asarray(function(*sources, mode))
            result = flushed(result) if flush else result
            result = saturated(result) if saturate else result
            return passing_nan(result, sources) if kind == "f64" else quiet(result, kind) if kind == "f32" else result

        return calculate

    return wrapped


def passing_nan(result, sources):
    """NaN of fp64: that of the first source that has one, quiet; or the one that is made of numbers."""
    broken = np.isnan(result)
    if not broken.any():
        return result
    bits = np.full(result.shape, MADE_NAN, np.uint64)
    for source in reversed(sources):
        source = np.broadcast_to(source, result.shape)
        bits = np.where(np.isnan(source), source.view(np.uint64) | np.uint64(1 << 51), bits)
    return np.where(broken, bits.view(np.float64), result)


def _apply(form, kind, count, calculate):
    """An action on values of one type, or on the parts of packed ones."""
    if kind in PACKED:
        reads, write = [form.packed(k, kind) for k in range(1, count + 1)], form.packed_target(0, kind)

        def in_parts(frame, on):
            parts = zip(*(read(frame, on) for read in reads), strict=True)
            write(frame, on, [calculate(*each) for each in parts])

        return in_parts
    reads, write = form.sources(1, count, kind), form.target(0, kind)
    return lambda frame, on: write(frame, on, calculate(*(read(frame, on) for read in reads)))


def _arithmetic(functions, count, default="rn"):
    """An instruction that rounds; `functions` by kind of its type, "half" for both halves."""

    def decode(form):
        kind = form.kinds(1, TYPES + PAIRS)
        if form.modifiers[-1:] == ["f32"]:
            return _mixed(form, kind, functions["f32"])
        part = PACKED.get(kind, kind)
        name = "half" if part in HALVES else part
        if name not in functions:
            raise form.unknown(f"form of it for .{kind}")
        calculate = _rounding(form, default)(functions[name], part)
        form.end(count + 1)
        return _apply(form, kind, count, calculate)

    return decode


def _mixed(form, kind, function):
    """`add.f32.bf16 d, a, c`: a is a half, widened exactly; c and d are fp32. Of `fma`, a and b are halves."""
    form.modifiers.pop()
    if kind not in HALVES or form.instruction.opcode not in ("add", "sub", "fma"):
        raise form.unknown("form of it with these types")
    calculate = _rounding(form)(function, "f32")
    count = len(form.operands) - 1
    form.end(4 if form.instruction.opcode == "fma" else 3)
    halves, last, write = form.sources(1, count - 1, kind), form.source(count, "f32"), form.target(0, "f32")

    def action(frame, on):
        narrow = [read(frame, on).astype(np.float32) for read in halves]
        write(frame, on, calculate(*narrow, last(frame, on)))

    return action


# Functions of sources and a rounding mode.


def _sum(sign):
    def of_f32(a, b, mode):
        return rounding.sum_f32(a, b if sign > 0 else -b, mode)

    def of_wide(a, b, mode):
        return a + b if sign > 0 else a - b

    return {"f32": of_f32, "f64": of_wide, "half": of_wide}


def _product_f32(a, b, mode):
    return a * b if mode == "rn" else rounding.directed(np.asarray(a).astype(np.float64) * b, mode)


def _quotient_f32(a, b, mode):
    return a / b if mode == "rn" else rounding.directed(np.asarray(a).astype(np.float64) / b, mode)


def _root_f32(a, mode):
    return np.sqrt(a) if mode == "rn" else rounding.directed(np.sqrt(np.asarray(a).astype(np.float64)), mode)


PRODUCT = {"f32": _product_f32, "f64": lambda a, b, mode: a * b, "half": lambda a, b, mode: a * b}
QUOTIENT = {"f32": _quotient_f32, "f64": lambda a, b, mode: a / b}
ROOT = {"f32": _root_f32, "f64": lambda a, mode: np.sqrt(a)}
INVERSE = {
    "f32": lambda a, mode: _quotient_f32(np.float32(1), a, mode),
    "f64": lambda a, mode: np.float64(1) / a,
}
FUSED = {
    "f32": lambda a, b, c, mode: rounding.fused_f32(*np.broadcast_arrays(a, b, c), mode),
    "f64": lambda a, b, c, mode: rounding.fused_f64(a, b, c),
    "half": lambda a, b, c, mode: rounding.sum_to_odd(a * b, c),  # the product is exact in fp64
}


# Signs, and the least and the greatest: nothing is rounded.


def _sign(change):
    """`abs` and `neg`, by bits. NaN of fp64 and the halves keeps its payload; of fp32 it is the unspecified one."""

    def decode(form):
        kind, flush = form.kinds(1, TYPES + PAIRS), form.flag("ftz")
        form.end(2)
        width = width_of(PACKED.get(kind, kind))
        if flush and kind != "f32":
            raise form.unknown(f".ftz of .{kind}")
        total = width_of(kind)
        read, write = form.source(1, f"b{total}"), form.target(0, f"b{total}")
        signs = sum(1 << (k + width - 1) for k in range(0, total, width))

        def action(frame, on):
            raw = np.asarray(read(frame, on))
            if flush:
                raw = flushed(raw.view(np.float32)).view(np.uint32)
            mask = raw.dtype.type(signs)
            raw = (raw & ~mask) if change == "clear" else (raw ^ mask)
            write(frame, on, quiet(raw.view(np.float32), "f32").view(raw.dtype) if kind == "f32" else raw)

        return action

    return decode


def _extreme(name):
    """`min` and `max`: of a number and NaN the number, of two NaN, or with `.NaN` of one, the canonical; −0 < +0.

    Of two sources; of three in fp32 (sm_100 and later).
    """

    def decode(form):
        kind = form.kinds(1, TYPES + PAIRS)
        flush, strict = form.flag("ftz"), form.flag("NaN")
        count = len(form.operands) - 1
        part = PACKED.get(kind, kind)
        if kind == "f32x2" or (flush and part != "f32") or (strict and kind == "f64"):
            raise form.unknown("form of it with these modifiers")
        form.end(4 if count == 3 and kind == "f32" else 3)

        def calculate(first, *others):
            result = np.asarray(flushed(first) if flush else first)
            for other in others:
                result = extreme(result, np.asarray(flushed(other) if flush else other), name, strict)
            return quiet(result, kind) if kind in ("f32", "f64") else result

        return _apply(form, kind, count, calculate)

    return decode


def extreme(a, b, name, strict):
    """The least or the greatest of two; zeros by their sign. With `strict`, NaN if one is."""
    result = (np.minimum if name == "min" else np.maximum)(a, b)  # NaN if one is
    broken = np.isnan(result)
    if broken.any() and not strict:
        result = np.where(broken, np.where(np.isnan(a), b, a), result)
    zeros = (a == 0) & (b == 0)
    zero = (np.logical_or if name == "min" else np.logical_and)(np.signbit(a), np.signbit(b))
    return np.where(zeros, np.where(zero, -0.0, 0.0).astype(result.dtype), result) if zeros.any() else result


def _copysign(form):
    """`copysign d, a, b`: b with the sign of a."""
    kind = form.kinds(1, ("f32", "f64"))
    form.end(3)
    width = width_of(kind)
    a, b = form.sources(1, 2, f"b{width}")
    write = form.target(0, f"b{width}")

    def action(frame, on):
        x, y = np.asarray(a(frame, on)), np.asarray(b(frame, on))
        sign = x.dtype.type(1 << (width - 1))
        write(frame, on, (x & sign) | (y & ~sign))

    return action


DECODERS = {
    "add": (_of_floats, _arithmetic(_sum(1), 2)),
    "sub": (_of_floats, _arithmetic(_sum(-1), 2)),
    "mul": (_of_floats, _arithmetic(PRODUCT, 2)),
    "fma": (_of_floats, _arithmetic(FUSED, 3, default=None)),
    "mad": (_of_floats, _arithmetic(FUSED, 3, default=None)),
    "div": (_of_floats, _arithmetic(QUOTIENT, 2, default=None)),
    "rcp": (_of_floats, _arithmetic(INVERSE, 1, default=None)),
    "sqrt": (_of_floats, _arithmetic(ROOT, 1, default=None)),
    "abs": (_of_floats, _sign("clear")),
    "neg": (_of_floats, _sign("flip")),
    "min": (_of_floats, _extreme("min")),
    "max": (_of_floats, _extreme("max")),
    "copysign": (_of_floats, _copysign),
}
