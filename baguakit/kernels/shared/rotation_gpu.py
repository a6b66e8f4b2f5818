"""The rotation of `rotation.py` for GPUs: the same additions of the same pairs."""

# What Triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from .noise_gpu import signed_words, uniform

SEED, SEED_HIGH = (tl.constexpr(word) for word in signed_words(0))


@triton.jit
def rotate(x):
    """Return blocks (blocks, width) rotated."""
    return butterflies(x * (signs_of(x.shape[1]) * (0.5 / x.shape[1])))


@triton.jit
def restore(x):
    """Return what blocks were that have been rotated."""
    return butterflies(x * (1 / x.shape[1])) * (signs_of(x.shape[1]) * (2 * x.shape[1]))


@triton.jit
def signs_of(WIDTH: tl.constexpr):
    place = tl.arange(0, WIDTH)[None, :].to(tl.int64)
    return tl.where(uniform(place, tl.full((), SEED, tl.int32), tl.full((), SEED_HIGH, tl.int32)) < 0.5, 1.0, -1.0)


@triton.jit
def butterflies(x):
    """Apply H: each step takes the lowest bit of the places, and turns it to the highest."""
    BLOCKS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    for step in tl.static_range(13):
        if 1 << step < WIDTH:
            a, b = tl.split(tl.reshape(x, (BLOCKS, WIDTH // 2, 2)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (BLOCKS, WIDTH))
    return x
