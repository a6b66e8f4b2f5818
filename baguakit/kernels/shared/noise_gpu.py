"""The random numbers of `noise.py` for GPUs: the same draws from the same keys."""

# What Triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from .noise import seed_words

ULP = tl.constexpr(2.0**-24)


@triton.jit
def uniform(at, seed, seed_high):
    """Return numbers in [0, 1) for 64-bit positions, from the two words of `signed_words`."""
    h = mix(at.to(tl.uint32) ^ seed.to(tl.uint32, bitcast=True))
    return (mix(h ^ (at >> 32).to(tl.uint32) ^ seed_high.to(tl.uint32, bitcast=True)) >> 8).to(tl.float32) * ULP


@triton.jit
def mix(h):
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    return h ^ (h >> 15)


def signed_words(key: int) -> tuple[int, int]:
    """Return the seed's two words as the signed 32-bit numbers that a launch takes."""
    seed, seed_high = seed_words(key)
    return signed(seed), signed(seed_high)


def signed(word: int) -> int:
    """Return a word of 32 bits as the signed integer of the same bits."""
    return word - (word >> 31 << 32)
