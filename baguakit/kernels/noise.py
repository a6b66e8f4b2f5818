"""Counter-based random numbers: a number depends on a key and a position only, not on device, order or history."""

from torch import Tensor

from ..hashing import mixed

WORD = 0xFFFFFFFF


def uniform(position: Tensor, seed: Tensor) -> Tensor:
    """Return numbers in [0, 1) with 24 bits, one for each int64 position, from the two 32-bit words of `seed`."""
    h = _mix((position & WORD) ^ seed[0])
    return (_mix(h ^ (position >> 32) ^ seed[1]) >> 8).float() * 2.0**-24


def _mix(h: Tensor) -> Tensor:
    # The 32-bit finalizer of least bias, from the hash-prospector project. Factors are < 2³¹, so products fit in int64.
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & WORD
    h = ((h ^ (h >> 15)) * 0x735A2D97) & WORD
    return h ^ (h >> 15)


def seed_words(key: int) -> tuple[int, int]:
    """Return the hash of `key` as two 32-bit words, low word first."""
    z = mixed(key)
    return z & WORD, z >> 32
