"""One bit a value."""

from dataclasses import dataclass

from ..kernels.blockwise.operators import Operators
from ..kernels.formats import sign
from .blockwise import Blockwise


@dataclass(frozen=True, repr=False)
class Sign(Blockwise):
    """One bit a value: its sign, times the mean magnitude of the block.

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

    @property
    def operators(self) -> Operators:
        return sign.OPERATORS
