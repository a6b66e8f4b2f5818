"""The arithmetic of `minmax_uint8.py` in NumPy: bit for bit the same, where rounding is not drawn.

Blocks are the last dimension of fp32 arrays; a header is (step, bottom), as on the wire.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

HALF, ONE, HALF_INTERVALS, SMALLEST = (np.float32(value) for value in (0.5, 1, 127.5, 2.0**-126))


def measure(x: Floats) -> tuple[Floats, Floats]:
    """Return the header of each block, and the factor that turns its values into levels: NaN if it is not finite."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    spread = high * HALF - low * HALF
    step = np.maximum(spread / HALF_INTERVALS, SMALLEST)
    scale = ONE / step
    header = np.concatenate([step, np.floor(low * scale + HALF)], -1)  # subnormals vanish beside a half
    equal, broken = (low == high)[..., 0], (spread - spread != 0)[..., 0]
    if (equal | broken).any():
        equal &= high[..., 0] != 0
        header[equal, :1], header[equal, 1], scale[equal] = high[equal], 1, 0
        header[broken], scale[broken] = (np.nan, 0), np.nan
    return header, scale


def encode(x: Floats, header: Floats, scale: Floats) -> Floats:
    """Return the code of each value: whole numbers from 0 to 255, and 0 where the scale is NaN."""
    level = x * scale
    level += HALF
    np.floor(level, out=level)
    level -= header[..., 1:]
    np.fmax(level, 0, out=level)  # 0 rather than NaN
    np.fmin(level, 255, out=level)
    return level


def decode(codes: NDArray[np.uint8], header: Floats) -> Floats:
    """Return the value of each code."""
    level = codes.astype(np.float32)
    level += header[..., 1:]
    level *= header[..., :1]
    return level
