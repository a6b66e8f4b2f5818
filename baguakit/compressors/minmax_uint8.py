"""Eight bits a value, on a grid of each block's own."""

from dataclasses import dataclass

from ..kernels.blockwise.operators import Operators
from ..kernels.formats import minmax_uint8
from .blockwise import Blockwise


@dataclass(frozen=True, repr=False)
class MinMaxUInt8(Blockwise):
    """Eight bits a value: a block of values on a grid of 256 levels, from its minimum to its maximum, that holds zero.

    The error is at most (max − min) / 510 of the block, plus a few ulps; zeros and blocks of equal values are exact. A
    block adds 8 bytes. `block=None` makes each row one block, as Bagua does: one outlier then coarsens the whole row.
    With `stochastic=True` values are rounded up or down at random without bias, drawn from `key` and the position of
    the value: ranks that must draw differently need different keys.

    Args:
        block: how many values a block has: a power of two, 64 to 8192; or None, the whole row.
        stochastic: round at random, as above, instead of to the nearest.

    Raises:
        ValueError: `block` is anything else.
    """

    block: int | None = 512
    stochastic: bool = False
    whole = True

    @property
    def operators(self) -> Operators:
        return minmax_uint8.OPERATORS
