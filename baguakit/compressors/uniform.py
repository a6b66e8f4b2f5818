"""One to eight bits a value, on a grid of each block's own."""

from dataclasses import dataclass
from typing import ClassVar

from ..arguments import integer
from ..kernels.blockwise.uniform import GRIDS, UniformFormat
from .blockwise import Blockwise


class Grid(Blockwise):
    """`bits` for each value of a block, which is rotated first where `rotate` is true."""

    bits: int
    rotate: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("bits", self.bits, 1, 8)

    @property
    def form(self) -> UniformFormat:
        return GRIDS[self.bits, self.rotate]


@dataclass(frozen=True, repr=False)
class Uniform(Grid):
    """So many bits a value: a block of values on an even grid of 2ᵇ levels of its own.

    The grid reaches from the block's minimum to its maximum and holds zero: the error is at most
    (max − min) / 2 (2ᵇ − 1), times 1.008 of fewer than eight bits. With `rotate=True` a block is first turned by a
    Hadamard transform with random signs, the same on all ranks: its values become nearly normal, whatever they were,
    and the error no longer follows the largest. It is then spread over all values of the block, zeros too. Of up to
    three bits, rotated, and of one bit always, the grid lies about zero with the step of least error for normal values.
    A block adds 4 bytes, of `bits=8` without rotation 8. Use fewer than eight bits with error feedback where gradients
    are averaged. With `stochastic=True` values are rounded up or down at random without bias, drawn from `key` and the
    position of the value: ranks that must draw differently need different keys.

    Args:
        bits: of a value, 1 to 8.
        block: how many values a block has: a power of two, 64 to 8192.
        rotate: turn each block first, as above.
        stochastic: round at random, as above, instead of to the nearest.

    Raises:
        ValueError: `bits` or `block` is anything else.
    """

    bits: int = 4
    block: int = 256
    rotate: bool = True
    stochastic: bool = False


@dataclass(frozen=True, repr=False)
class MinMaxUInt8(Grid):
    """Eight bits a value: a block of values on a grid of 256 levels, from its minimum to its maximum, that holds zero.

    The error is at most (max − min) / 510 of the block, plus a few ulps; zeros and blocks of equal values are exact. A
    block adds 8 bytes: 8.125 bits a value. The bytes of `Uniform(8, 512, rotate=False)`.

    Args:
        block: how many values a block has: a power of two, 64 to 8192.
        stochastic: round at random without bias, as `Uniform` does, instead of to the nearest.

    Raises:
        ValueError: `block` is anything else.
    """

    block: int = 512
    stochastic: bool = False

    bits: ClassVar[int] = 8  # type: ignore[misc]
    rotate: ClassVar[bool] = False  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class UInt4(Grid):
    """Four bits a value: `Uniform(4, rotate=False)`, 4.125 bits with the four bytes of a block.

    The error is at most (max − min) / 29.7 of the block, or, if that is less, the largest magnitude / 64995, plus a few
    ulps; zeros are exact. With `rotate=True` its square is about 1.2 % of that of the values, whatever their
    distribution. Use it with error feedback where gradients are averaged.

    Args:
        block: how many values a block has: a power of two, 64 to 8192.
        stochastic: round at random without bias, as `Uniform` does, instead of to the nearest.
        rotate: turn each block first, as `Uniform` does.

    Raises:
        ValueError: `block` is anything else.
    """

    block: int = 256
    stochastic: bool = False
    rotate: bool = False

    bits: ClassVar[int] = 4  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class UInt2(Grid):
    """Two bits a value: `Uniform(2, 128)`, 2.25 bits with the four bytes of a block.

    The square of the error is about 12 % of that of the values, whatever their distribution: use it with error
    feedback.

    Args:
        block: how many values a block has: a power of two, 64 to 8192.
        stochastic: round at random without bias, as `Uniform` does, instead of to the nearest.
        rotate: turn each block first, as `Uniform` does.

    Raises:
        ValueError: `block` is anything else.
    """

    block: int = 128
    stochastic: bool = False
    rotate: bool = True

    bits: ClassVar[int] = 2  # type: ignore[misc]


@dataclass(frozen=True, repr=False)
class Sign(Grid):
    """One bit a value: its sign, times the mean magnitude of the block. `Uniform(1, 1024, rotate=False)`.

    Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", arXiv:1901.09847.

    Of all that a block can be with one magnitude and these signs it is the nearest, and yet far: use it with error
    feedback, and with plain SGD or a smaller step, since momentum amplifies what returns. Zeros read as positive,
    unless their whole block is zero. A block adds 4 bytes: 1.03 bits a value.

    Args:
        block: how many values a block has: a power of two, 64 to 8192.

    Raises:
        ValueError: `block` is anything else.
    """

    block: int = 1024

    bits: ClassVar[int] = 1  # type: ignore[misc]
    rotate: ClassVar[bool] = False  # type: ignore[misc]
