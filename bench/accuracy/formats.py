"""The formats on the page: the dense ones of `baguakit.compressors`, and those of others beside them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from baguakit.compressors import BFloat16, Compressor, Float8, Float16, Sign, Uniform

from . import references
from .references import MX_BLOCK, NV_BLOCK, SCALE_BITS, Element

VALUES = 1 << 20  # of which bits are told
BLOCKS = {1: (1024,), 2: (128,), 4: (256, 64), 8: (512,)}  # of `Uniform`, by bits; 256 for all others
ELEMENTS = {
    "MXFP8 e4m3": references.E4M3,
    "MXFP8 e5m2": references.E5M2,
    "MXINT8": references.INT8,
    "MXFP6 e2m3": references.E2M3,
    "MXFP6 e3m2": references.E3M2,
    "MXFP4": references.E2M1,
}


@dataclass(frozen=True)
class Format:
    """A way to write values.

    Attributes:
        name: ours as the expression that makes it.
        bits: of a value.
        read: return the values (n,) that a tensor (n,) reads as.
        compressor: ours, or None.
    """

    name: str
    bits: float
    read: Callable[[Tensor], Tensor]
    compressor: Compressor | None = None

    @property
    def drawing(self) -> Any:
        """Return the compressor that draws its roundings, or None."""
        if not isinstance(self.compressor, Uniform | Float8):
            return None
        return replace(self.compressor, stochastic=True)


def compressors() -> list[Compressor]:
    """Return a compressor for each format of ours. `MinMaxUInt8`, `UInt4` and `UInt2` write the bytes of some."""
    grids = [
        Uniform(bits, block, rotate)
        for bits in range(1, 9)
        for block in BLOCKS.get(bits, (256,))
        for rotate in (False, True)
    ]
    return [*grids, Sign(1024), Float8("e4m3", 128), Float8("e5m2", 128), BFloat16(), Float16()]


def formats() -> list[Format]:
    """Return all formats, by bits."""
    found = [_ours(each) for each in compressors()]
    found += [_mx(name, element) for name, element in ELEMENTS.items()]
    found.append(Format("NVFP4", references.E2M1.bits + SCALE_BITS / NV_BLOCK + 32 / VALUES, references.nvfp4))
    return sorted(found, key=lambda each: each.bits)


def _ours(compressor: Compressor) -> Format:
    def read(x: Tensor) -> Tensor:
        return compressor.decompress(compressor.compress(x[None]), len(x))[0]

    return Format(_name(compressor), 8 * compressor.row_bytes(VALUES) / VALUES, read, compressor)


def _name(compressor: Compressor) -> str:
    """Return the expression that makes a compressor, with each argument that tells it from others."""
    if isinstance(compressor, Uniform):
        return f"Uniform({compressor.bits}, {compressor.block}, rotate={compressor.rotate})"
    return f'Float8("{compressor.format}")' if isinstance(compressor, Float8) else repr(compressor)


def _mx(name: str, element: Element) -> Format:
    return Format(name, element.bits + SCALE_BITS / MX_BLOCK, functools.partial(references.mx, element))
