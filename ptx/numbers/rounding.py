"""Sums and products of fp32 and fp64 as if computed exactly and rounded once: PTX ISA, section 9.7.3.

NumPy rounds to nearest. The other modes, and fused products, need what rounding loses: it is computed exactly here, by
error-free transformations (T. J. Dekker 1971; S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums",
2008), or in fractions where those would leave the range of fp64.
"""

from fractions import Fraction

import numpy as np

INFINITY = np.float32(np.inf)


def directed(values: np.ndarray, mode: str) -> np.ndarray:
    """fp64 as fp32: to nearest (rn), toward zero (rz), down (rm) or up (rp).

    A quotient or root of fp32 in fp64 lies on the same side of every number of fp32 and every middle of two as the
    exact one: it may be rounded twice. A sum must be rounded to odd first.
    """
    near = values.astype(np.float32)
    if mode == "rn":
        return near
    wide = near.astype(np.float64)
    low, high = {"rz": (values < 0, values > 0), "rm": (False, True), "rp": (True, False)}[mode]
    near = np.where((wide > values) & high, np.nextafter(near, -INFINITY), near)
    return np.where((wide < values) & low, np.nextafter(near, INFINITY), near)


def sum_to_odd(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The sum of two fp64, rounded to odd: rounded toward zero, and its last bit set if that was not exact."""
    near, lost = two_sum(a, b)
    bits = near.view(np.int64)
    inexact = (lost != 0) & np.isfinite(near) & (bits & 1 == 0)
    toward = np.where((lost > 0) == (near > 0), 1, -1)
    return (bits + np.where(inexact, toward, 0)).view(np.float64)


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A sum, and exactly what its rounding lost (D. Knuth)."""
    near = a + b
    back = near - a
    return near, (a - (near - back)) + (b - back)


def two_product(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A product, and exactly what its rounding lost, unless it over- or underflows (Dekker)."""
    near = a * b
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    return near, ((a_high * b_high - near) + a_high * b_low + a_low * b_high) + a_low * b_low


def _split(x):
    scaled = x * 134217729.0  # 2²⁷ + 1
    high = scaled - (scaled - x)
    return high, x - high


def fused_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray, mode: str = "rn") -> np.ndarray:
    """a · b + c of fp32, rounded once: the product is exact in fp64."""
    product, c = a.astype(np.float64) * b, c.astype(np.float64)
    return directed(signed_zero(sum_to_odd(product, c), product, c, mode), mode)


def sum_f32(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """a + b of fp32."""
    if mode == "rn":
        return a + b
    a, b = a.astype(np.float64), b.astype(np.float64)
    return directed(signed_zero(sum_to_odd(a, b), a, b, mode), mode)


def signed_zero(total: np.ndarray, a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Rounded down, a sum that cancels is −0."""
    if mode != "rm":
        return total
    return np.where((total == 0) & ~((a == 0) & ~np.signbit(a) & (b == 0) & ~np.signbit(b)), -0.0, total)


def fused_f64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c of fp64, rounded once, to nearest."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product, low = two_product(a, b)
    middle, lost = two_sum(c, low)
    high, rest = two_sum(product, middle)
    result = high + sum_to_odd(rest, lost)
    sizes = [np.abs(each) for each in (a, b, c, product, result)]
    safe = [(size < 2.0**990) & (size > 2.0**-900) for size in sizes]
    extreme = ~np.logical_and.reduce(safe)
    if extreme.any():
        result = np.array(result)
        each = zip(a[extreme].tolist(), b[extreme].tolist(), c[extreme].tolist(), strict=True)
        result[extreme] = [_fused(*numbers) for numbers in each]
    return result


def _fused(a, b, c):
    if not np.isfinite([a, b]).all() or a == 0 or b == 0:
        return np.float64(a) * np.float64(b) + np.float64(c)  # no rounding is in it; zeros have signs
    if not np.isfinite(c):
        return c  # even if the product is too large for fp64
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return float(exact) if exact else 0.0  # division of integers is rounded once, subnormals too
    except OverflowError:
        return np.copysign(np.inf, float(exact.numerator > 0) - 0.5)
