"""The description of a blockwise format."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from .layout import aligned, blocks_of, bytes_of

Array = NDArray[Any]


class Arithmetic(NamedTuple):
    """The functions of a format for arrays (…, width) of NumPy, as if rounding were not drawn.

    `measure` gives headers (…, numbers) and factors (…, 1), and `encode` codes as whole numbers of any dtype.
    """

    measure: Callable[[Array], tuple[Array, Array]]
    encode: Callable[[Array, Array, Array], Array]
    decode: Callable[[Array, Array], Array]


class Format:
    """Rows of values as a code for each value and a header for each block; a frozen dataclass with three functions.

    On the wire a row is its codes, zeros up to a multiple of 16 bytes, its headers, and zeros up to a multiple of 16.
    The last block of a row holds the values that remain. Arithmetic is fp32: bf16 and fp16 are exact in it, and fp64
    is rounded to it first. A block with a NaN or an infinity has codes 0 and a header by which it reads as NaN.

    Attributes:
        bits: of a code: 8, 4 or 1.
        header: the numbers that head a block: their dtype, and how many.
        arrays: the same for few values, for which calls of torch take too long; or None.
    """

    bits: ClassVar[int]
    header: ClassVar[tuple[torch.dtype, int]]
    arrays: ClassVar[Arithmetic | None] = None

    @property
    def name(self) -> str:
        """The name of its operators."""
        raise NotImplementedError

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

    def device(self) -> Mapping[str, Any]:
        """The same for GPUs: the constants of the kernels in `gpu`."""
        raise NotImplementedError

    def row_bytes(self, n: int, block: int | None) -> int:
        """How many bytes a row of `n` values takes on the wire; without `block` the row is one block."""
        return self.layout(n, block).row

    def header_at(self, n: int, block: int | None) -> int:
        """Where in a row its headers begin."""
        return self.layout(n, block).header_at

    @property
    def header_bytes(self) -> int:
        return self.header[0].itemsize * self.header[1]

    def layout(self, n: int, block: int | None) -> "Layout":
        """Where in a row everything is."""
        codes, headers = bytes_of(n, block, self.bits), self.header_bytes * blocks_of(n, block)
        return Layout(codes, aligned(codes), aligned(codes) + headers, aligned(codes) + aligned(headers))

    def parts(self, packed: Tensor, n: int, block: int | None) -> tuple[Tensor, Tensor]:
        """Return the codes (rows, bytes) of packed rows and their headers (rows, blocks, numbers), as views."""
        at = self.layout(n, block)
        headers = packed[:, at.header_at : at.header_end].view(self.header[0])
        return packed[:, : at.code_end], headers.view(packed.shape[0], blocks_of(n, block), self.header[1])

    def empty(self, rows: int, n: int, block: int | None, device: torch.device) -> Tensor:
        """Room for packed rows; what no value or header fills is zero."""
        return self.layout(n, block).empty(rows, device)


class Layout(NamedTuple):
    """The bytes of a row: where its codes end, where its headers begin and end, and how many there are."""

    code_end: int
    header_at: int
    header_end: int
    row: int

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """Return room for rows; what no value or header fills is zero."""
        packed = torch.empty(rows, self.row, dtype=torch.uint8, device=device)
        for begin, end in ((self.code_end, self.header_at), (self.header_end, self.row)):
            if begin < end:
                packed[:, begin:end].zero_()
        return packed
