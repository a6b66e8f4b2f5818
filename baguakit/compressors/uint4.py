"""Four bits a value, on a grid of each block's own."""

from dataclasses import dataclass

from ..kernels.blockwise.operators import Operators
from ..kernels.formats import uint4
from .blockwise import Blockwise


@dataclass(frozen=True, repr=False)
class UInt4(Blockwise):
    """Four bits a value: a block of values on a grid of 16 levels, from its minimum to its maximum, that holds zero.

    The error is at most (max − min) / 29.7 of the block, or, if that is less, the largest magnitude / 64995, plus a few
    ulps; zeros are exact. A block adds 4 bytes: 4.125 bits a value. Use it with error feedback where gradients are
    averaged. With `stochastic=True` values are rounded up or down at random without bias, drawn from `key` and the
    position of the value: ranks that must draw differently need different keys.

    Args:
        block: how many values a block has: a power of two, 64 to 8192.
        stochastic: round at random, as above, instead of to the nearest.

    Raises:
        ValueError: `block` is anything else.
    """

    block: int = 256
    stochastic: bool = False

    @property
    def operators(self) -> Operators:
        return uint4.OPERATORS
