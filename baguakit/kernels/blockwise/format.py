"""The interface of blockwise formats."""

from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from .layout import Layout, aligned, plane_bytes, planes_of, runs_of


class Format:
    """Rows of values as a code for each value and a header for each block: attributes, and three functions.

    On the wire a row is its codes, zeros up to a multiple of 16 bytes, its headers, and zeros up to a multiple of 16.
    The last block of a row holds the values that remain, and zeros where blocks are padded. Arithmetic is fp32: bf16
    and fp16 are exact in it, and fp64 is rounded to it first. A block with a NaN or an infinity has codes 0 and a
    header by which it reads as NaN.

    Attributes:
        name: the prefix of the names of its operators.
        bits: of a code, 1 to 8.
        header: the numbers that head a block: their dtype, and how many.
        padded: the last block of a row is stored like the others; else it ends with the row.
        rotated: blocks are rotated before they are measured (`shared/rotation.py`). Rows are added rotated.
        numbers: further numbers that its kernels take as constants.
        in_numpy: a module with the operations, undrawn, for few values, for which calls of torch take too long.
    """

    name: str
    bits: int
    header: tuple[torch.dtype, int]
    padded: bool = False
    rotated: bool = False
    numbers: tuple[int, ...] = ()
    in_numpy: ModuleType | None = None

    def __repr__(self) -> str:
        return self.name  # of which, among others, the names of compiled units are made

    def measure(self, x: Tensor, drawn: bool) -> tuple[Tensor, Tensor]:
        """Return the headers of blocks (…, width), and (…, 1) the factor that turns values into levels.

        `drawn` tells whether values will be rounded by draws. The factor of a block that is not finite is NaN.
        """
        raise NotImplementedError

    def encode(self, x: Tensor, header: Tensor, scale: Tensor, draw: Tensor | None) -> Tensor:
        """Return the code of each value, in a uint8; with `draw`, numbers in [0, 1), round up where they say so."""
        raise NotImplementedError

    def decode(self, codes: Tensor, header: Tensor) -> Tensor:
        """Return the value of each code."""
        raise NotImplementedError

    @property
    def header_bytes(self) -> int:
        """Return the bytes of one header."""
        return self.header[0].itemsize * self.header[1]

    @lru_cache(maxsize=4096)  # noqa: B019 formats live as long as the process, and lengths of buckets are few
    def layout(self, n: int, block: int) -> Layout:
        """Return the layout of rows of `n` values."""
        blocks, planes, end = -(-n // block), [], 0
        for plane in planes_of(self.bits):
            size = plane_bytes(blocks * block if self.padded else n, block, plane)
            planes.append(slice(end, end + size))
            end += aligned(size)
        ends = end, end + blocks * self.header_bytes
        runs = tuple(runs_of(n, block, planes_of(self.bits), self.padded))
        return Layout(tuple(planes), *ends, self.row_bytes(n, block), (blocks, self.header[1]), self.header[0], runs)

    def row_bytes(self, n: int, block: int) -> int:
        """Return how many bytes a row of `n` values takes on the wire; `n` may be a symbol of `torch.compile`."""
        blocks = -(-n // block)
        stored = blocks * block if self.padded else n
        codes = sum(aligned(plane_bytes(stored, block, plane)) for plane in planes_of(self.bits))
        return codes + aligned(blocks * self.header_bytes)
