"""The types of PTX as NumPy's: PTX ISA, section 5.2 "Types".

A register holds raw bits, as an unsigned integer of its width, or a Boolean. Types are views of those bits. The halves
f16 and bf16 are calculated with as fp64, in which each is exact.
"""

import numpy as np

UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
FLOATS = {32: np.float32, 64: np.float64}

# By name: the dtype of a value. Bits (.b32) are unsigned.
DTYPES = {f"{letter}{width}": UNSIGNED[width] for letter in "ub" for width in UNSIGNED}
DTYPES |= {f"s{width}": SIGNED[width] for width in SIGNED}
DTYPES |= {"f32": np.float32, "f64": np.float64, "pred": np.bool_}
HALVES = ("f16", "bf16")
PACKED = {"f16x2": "f16", "bf16x2": "bf16", "u16x2": "u16", "s16x2": "s16", "f32x2": "f32"}

# Of fp32 the manual says "an unspecified NaN" where this is used; of the halves and of min and max "canonical NaN".
NAN = {"f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF}
# The one that an operation on fp64 makes of numbers, as ∞ − ∞.
MADE_NAN = 0xFFF8000000000000


def is_float(kind: str) -> bool:
    return kind in ("f32", "f64", *HALVES)


def width_of(kind: str) -> int:
    if kind in PACKED:
        return 2 * width_of(PACKED[kind])
    return 1 if kind == "pred" else 16 if kind == "bf16" else int(kind[1:])


def constant(bits: int, width: int) -> np.generic:
    """The last `width` bits of an integer."""
    return UNSIGNED[width](bits & ((1 << width) - 1))


def quiet(values: np.ndarray, kind: str) -> np.ndarray:
    """Replace each NaN by the one that `kind` has for all."""
    broken = np.isnan(values)
    if not broken.any():
        return values
    return np.where(broken, UNSIGNED[width_of(kind)](NAN[kind]).view(values.dtype), values)


def flushed(values: np.ndarray) -> np.ndarray:
    """`.ftz`: subnormals of fp32 become zeros of their sign."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.copysign(np.float32(0), values), values)


def saturated(values: np.ndarray) -> np.ndarray:
    """`.sat`: between 0 and 1; NaN, and zero of either sign, become +0."""
    return np.where(values > 0, np.minimum(values, values.dtype.type(1)), values.dtype.type(0))


def halves_to_double(raw: np.ndarray, kind: str) -> np.ndarray:
    """f16 or bf16, by their bits, as fp64: exact."""
    if kind == "f16":
        return raw.view(np.float16).astype(np.float64)
    return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def double_to_halves(values: np.ndarray, kind: str) -> np.ndarray:
    """fp64 as the bits of f16 or bf16: to nearest, ties to even; NaN is canonical."""
    if kind == "f16":
        raw = values.astype(np.float16).view(np.uint16)
    else:
        bits = to_odd(values).view(np.uint32)
        raw = (bits.astype(np.uint64) + np.uint64(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint64(16)
        raw = raw.astype(np.uint16)
    return np.where(np.isnan(values), UNSIGNED[16](NAN[kind]), raw)


def to_odd(values: np.ndarray) -> np.ndarray:
    """fp64 as fp32, rounded toward zero, its last bit set where that was not exact.

    What is rounded to a shorter type afterwards is then as if it had been rounded once.
    """
    near = values.astype(np.float32)
    cut = np.where(np.abs(near.astype(np.float64)) > np.abs(values), np.nextafter(near, np.float32(0)), near)
    inexact = (cut.astype(np.float64) != values) & np.isfinite(values)
    return (cut.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)
