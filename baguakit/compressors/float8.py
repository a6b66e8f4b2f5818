"""Eight bits a value, as float8."""

from dataclasses import dataclass

from ..arguments import describe
from ..kernels.blockwise import float8
from .blockwise import Blockwise

FORMATS = {"e4m3": float8.E4M3, "e5m2": float8.E5M2}


@dataclass(frozen=True, repr=False)
class Float8(Blockwise):
    """Eight bits a value: a float8 number, scaled by a power of two that each block has of its own.

    Unlike MinMaxUInt8's, the error follows the value: in the `format` "e4m3" at most 1/16 of it and in "e5m2" 1/8, down
    to 2⁻¹⁴ (2⁻²⁹) of the block's largest magnitude, below which it is at most half of the least number. Of values that
    are spread evenly MinMaxUInt8 loses less; where small ones lie beside large ones, this. Zeros are exact. A block
    adds one byte: 8.0625 bits a value. With `stochastic=True` values are rounded up or down at random without bias,
    drawn from `key` and the position of the value: ranks that must draw differently need different keys.

    Args:
        format: "e4m3", of more precision, or "e5m2", of more range.
        block: how many values a block has: a power of two, 64 to 8192.
        stochastic: round at random, as above, instead of to the nearest.

    Raises:
        ValueError: `block` is anything else, or there is no such format.
    """

    format: str = "e4m3"
    block: int = 128
    stochastic: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, str) or self.format not in FORMATS:
            raise ValueError(
                f'format of Float8 is "e4m3", with more precision, or "e5m2", with more range, not '
                f"{describe(self.format)}; Float8() takes {type(self).format!r}"
            )
        super().__post_init__()

    @property
    def form(self) -> float8.Float8Format:
        return FORMATS[self.format]
