"""The interface of blockwise formats."""

from functools import lru_cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from .layout import Layout, layout_of, row_bytes


class Format:
    """Rows of values as a code for each value and a header for each block; a frozen dataclass with three functions.

    On the wire a row is its codes, zeros up to a multiple of 16 bytes, its headers, and zeros up to a multiple of 16.
    The last block of a row holds the values that remain, and zeros where blocks are padded. Arithmetic is fp32: bf16
    and fp16 are exact in it, and fp64 is rounded to it first. A block with a NaN or an infinity has codes 0 and a
    header by which it reads as NaN.

    Attributes:
        bits: of a code, 1 to 8.
        rotated: blocks are rotated before they are measured (`shared/rotation.py`). Rows are added rotated.
    """

    bits: int
    rotated: bool = False

    @property
    def name(self) -> str:
        """Return the prefix of the names of its operators."""
        raise NotImplementedError

    @property
    def header(self) -> tuple[torch.dtype, int]:
        """Return the numbers that head a block: their dtype, and how many."""
        raise NotImplementedError

    @property
    def padded(self) -> bool:
        """Return whether the last block of a row is stored like the others; else it ends with the row."""
        return False

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
    def in_numpy(self) -> ModuleType | None:
        """Return a module with the operations, undrawn, for few values, for which calls of torch take too long."""
        return None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return further numbers that its kernels take as constants."""
        return ()

    def on_gpus(self) -> tuple[ModuleType, tuple[int, ...]]:
        """Return the module with the same for GPUs, and the FORM of its kernels (see `gpu.py`)."""
        return import_module(f"{type(self).__module__}_gpu"), (self.bits, self.padded, self.rotated, *self.numbers)

    @property
    def header_bytes(self) -> int:
        """Return the bytes of one header."""
        return self.header[0].itemsize * self.header[1]

    @lru_cache(maxsize=4096)  # noqa: B019 formats live as long as the process, and lengths of buckets are few
    def layout(self, n: int, block: int) -> Layout:
        """Return the layout of rows of `n` values."""
        return layout_of(n, block, self.bits, self.header, self.padded)

    def row_bytes(self, n: int, block: int) -> int:
        """Return how many bytes a row of `n` values takes on the wire; `n` may be a symbol of `torch.compile`."""
        return row_bytes(n, block, self.bits, self.header_bytes, self.padded)
