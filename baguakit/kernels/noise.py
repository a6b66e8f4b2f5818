"""Counter-based random numbers: a number depends on a key and a position only, not on device, order or history."""

from torch import Tensor

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
    """Return the SplitMix64 hash of `key` as two 32-bit words, low word first. Adjacent keys give unrelated words."""
    mask = (1 << 64) - 1
    z = ((key + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return z & WORD, z >> 32
