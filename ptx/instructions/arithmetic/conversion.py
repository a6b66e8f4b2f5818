"""Conversion: PTX ISA, section 9.7.9.22 "Data Movement and Conversion Instructions: cvt".

integer to integer    the last bits, filled with zeros or the sign; with `.sat`, the nearest that there is
integer to float      rounded once
float to integer      rounded by .rni, .rzi, .rmi or .rpi, to the nearest that there is; NaN is 0, or, if a type of
                      64 bits takes part, the number whose highest bit alone is set
float to float        rounded once if narrower; with .rni and the like, to an integer
"""

import numpy as np

from ...numbers import rounding
from ...numbers.types import DTYPES, FLOATS, HALVES, PACKED, flushed, is_float, quiet, saturated, width_of

INTEGERS = tuple(f"{letter}{width}" for letter in "us" for width in (8, 16, 32, 64))
TYPES = (*INTEGERS, "f32", "f64", *HALVES)
MODES = ("rn", "rz", "rm", "rp")
TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _any_type(modifiers):
    return True


def _cvt(form):
    to, of = form.kinds(2, (*TYPES, "f16x2", "bf16x2"))
    if to in PACKED:
        return _packed(form, to, of)
    if of in PACKED:
        raise form.unknown(f"conversion of .{of}")
    convert = _conversion(form, to, of)
    form.end(2)
    read, write = form.source(1, of), form.target(0, to)
    return lambda frame, on: write(frame, on, convert(np.asarray(read(frame, on))))


def _packed(form, to, of):
    """`cvt.rn.bf16x2.f32 d, a, b`: a becomes the upper half, b the lower."""
    if of != "f32" or not form.flag("rn"):
        raise form.unknown("such conversion to two halves")
    form.end(3)
    (high, low), write = form.sources(1, 2, of), form.packed_target(0, to)

    def action(frame, on):
        write(frame, on, [np.asarray(read(frame, on)).astype(np.float64) for read in (low, high)])

    return action


def _conversion(form, to, of):
    if is_float(of) and is_float(to):
        return _float_to_float(form, to, of)
    if is_float(of):
        return _float_to_integer(form, to, of)
    if is_float(to):
        return _integer_to_float(form, to, of)
    saturate, limits = form.flag("sat"), np.iinfo(DTYPES[to])
    return lambda x: (_clipped(x, limits) if saturate else x).astype(DTYPES[to])


def _clipped(x, limits):
    """Integers between the limits of another type, in their own."""
    own = np.iinfo(x.dtype)
    return np.clip(x, x.dtype.type(max(limits.min, own.min)), x.dtype.type(min(limits.max, own.max)))


def _integer_to_float(form, to, of):
    mode, saturate = form.choice(*MODES), form.flag("sat")
    if mode is None or (mode != "rn" and to != "f32") or saturate:
        raise form.unknown("such rounding of an integer")
    if to == "f32" and (width_of(of) < 64 or mode == "rn"):
        if mode == "rn":
            return lambda x: x.astype(np.float32)
        return lambda x: rounding.directed(x.astype(np.float64), mode)
    if to == "f64":
        return lambda x: x.astype(np.float64)
    if to in HALVES and width_of(of) < 64:
        return lambda x: x.astype(np.float64)  # exact; writing it rounds
    raise form.unknown("such conversion of 64 bits")


def _float_to_integer(form, to, of):
    name, flush = form.choice(*TO_INTEGER), form.flag("ftz")
    form.flag("sat")  # it goes without saying
    if name is None or (flush and of != "f32"):
        raise form.unknown("conversion to an integer without .rni or the like")
    dtype, width = DTYPES[to], width_of(to)
    limits, half = np.iinfo(dtype), dtype(np.iinfo(dtype).min) if to[0] == "s" else dtype(1 << (width - 1))
    of_nan = half if of == "f64" or width == 64 else dtype(0)

    def convert(x):
        whole = TO_INTEGER[name](flushed(x) if flush else x).astype(np.float64)
        high, low = whole >= float(limits.max), whole <= float(limits.min)
        inside = np.where(high | low | np.isnan(whole), 0.0, whole).astype(dtype)
        inside = np.where(high, dtype(limits.max), np.where(low, dtype(limits.min), inside))
        return np.where(np.isnan(whole), of_nan, inside)

    return convert


def _float_to_float(form, to, of):
    name, mode = form.choice(*TO_INTEGER), form.choice(*MODES)
    flush, saturate = form.flag("ftz"), form.flag("sat")
    narrower = width_of(to) < width_of(of)
    if (name and to != of) or (narrower and mode is None) or (mode not in (None, "rn") and to != "f32"):
        raise form.unknown(f"such rounding of .{of} to .{to}")
    if (flush or saturate) and "f32" not in (to, of):
        raise form.unknown("such modifiers of it")

    def convert(x):
        x = flushed(x) if flush and of == "f32" else x
        x = TO_INTEGER[name](x) if name else x
        if to == "f32":
            x = quiet(x if of == "f32" else rounding.directed(x, mode or "rn"), "f32")
            x = flushed(x) if flush else x
        else:
            x = x.astype(FLOATS[64])  # of halves, too: writing them rounds
        return saturated(x) if saturate else x

    return convert


DECODERS = {"cvt": (_any_type, _cvt)}
