"""Well-mixed bits of whole numbers, and digests of tensors, the same on every machine and in every process."""

import hashlib
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .tensors import bytes_of, plain

Numbers = TypeVar("Numbers", int, NDArray[np.uint64])


def mixed(numbers: Numbers) -> Numbers:
    """Return 64 bits for a number, or for each of an array (SplitMix64). Those of adjacent numbers are unrelated."""
    mask = (1 << 64) - 1
    z: Any = ((numbers + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    result: Numbers = z ^ (z >> 31)
    return result


def digest(x: Tensor) -> bytes:
    """Return 16 bytes of SHA-1, which tell whether the bits of tensors differ (not if somebody wants to hide it)."""
    bits: Any = bytes_of(plain(x.detach().cpu())).numpy()
    return hashlib.sha1(bits.data, usedforsecurity=False).digest()[:16]
