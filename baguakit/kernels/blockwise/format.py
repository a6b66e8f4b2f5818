"""Formats in blocks: the layout of their rows, values in blocks and blocks in bytes; and their interface."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

# The number of values, about, that a unit takes at once. With fewer, calls cost more than caches save.
RUN = 1 << 20


def aligned(count: int) -> int:
    """Round up to 16 bytes, so that every part of a row can be read 16 bytes at a time."""
    return (count + 15) // 16 * 16


def planes_of(bits: int) -> tuple[int, ...]:
    """Return the widths of the planes that a code is cut into: powers of two that add up to `bits`, (4, 1) for 5."""
    return tuple(plane for plane in (8, 4, 2, 1) if bits & plane)


class Run(NamedTuple):
    """Neighbouring blocks of one width."""

    columns: slice  # their values in a row
    width: int  # of a block, as it is stored
    height: int  # how many blocks
    missing: int  # values of the last block that are stored as zeros, since the row has ended
    bytes: tuple[slice, ...]  # their headers in a packed row, and their codes by plane
    dtype: torch.dtype  # of headers

    def values_of(self, rows: Tensor) -> Tensor:
        """Return the values of this run: a view (…, blocks, width − missing)."""
        return rows[..., self.columns].view(*rows.shape[:-1], self.height, self.width - self.missing)

    def parts_of(self, rows: Tensor) -> list[Tensor]:
        """Return the headers (…, blocks, numbers) of this run in packed rows, and its codes by plane: views."""
        headers, *codes = [rows[..., part].unflatten(-1, (self.height, -1)) for part in self.bytes]
        return [headers.view(self.dtype), *codes]


class Layout(NamedTuple):
    """The bytes of a packed row: the planes of its codes, its headers, and zeros behind each up to a multiple of 16."""

    row: int  # the number of bytes
    header_at: int  # where the headers begin
    zeros: tuple[slice, ...]  # the bytes that no code or header fills
    runs: tuple[Run, ...]  # the blocks of a row, whole ones first

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """Return memory for packed rows; what no code or header fills is zero."""
        packed = torch.empty(rows, self.row, dtype=torch.uint8, device=device)
        for part in self.zeros:
            packed[:, part].zero_()
        return packed


# A block of w values with 8 / bits to a byte is cut in as many stripes of ⌈w · bits / 8⌉ values, the last padded with
# zeros, and byte i holds value i of every stripe, the first stripe's lowest. Neighbouring bytes thus hold neighbouring
# values: a thread that reads 16 bytes of values in each stripe writes whole words of codes and shuffles nothing. Codes
# of 3, 5, 6 or 7 bits are cut in planes of 4, 2 and 1, the lowest bits first.


def join_(planes: Sequence[Tensor], codes: Tensor, bits: int) -> None:
    """Write codes (…, w) of `bits` each, as uint8, to the bytes (…, ⌈w · plane / 8⌉) of each plane."""
    if bits == 8:
        planes[0].copy_(codes)
        return
    shift, codes = 0, codes.int()
    for bytes_, plane in zip(planes, planes_of(bits), strict=True):
        part = codes >> shift if shift else codes
        shift += plane
        if plane < 8 and shift < bits:  # of more than a byte only the lowest eight bits are copied
            part = part & (1 << plane) - 1
        striped = stripes(part, plane)
        joined = striped[..., 0, :]
        for i in range(1, 8 // plane):
            joined = torch.add(joined, striped[..., i, :], alpha=1 << i * plane)
        bytes_.copy_(joined)


def split(planes: Sequence[Tensor], bits: int) -> Tensor:
    """Return the codes in bytes, in the stripes (…, count, width) of the widest plane: uint8 of 8 bits, else int32."""
    if bits == 8:
        return planes[0].unsqueeze(-2)
    codes, shift = None, 0
    for bytes_, plane in zip(planes, planes_of(bits), strict=True):
        part = bytes_.unsqueeze(-2).int()
        if plane < 8:  # whole bytes come first, and are their codes' lowest eight bits as they are
            shifts = torch.arange(0, 8, plane, device=bytes_.device, dtype=torch.int32).unsqueeze(-1)
            part = part >> shifts & (1 << plane) - 1
        codes = part if codes is None else torch.add(codes, part.reshape(codes.shape), alpha=1 << shift)
        shift += plane
    assert codes is not None
    return codes


def stripes(values: Tensor, bits: int) -> Tensor:
    """Return values (…, w) as stripes (…, count, width), as codes of `bits` bits are packed; pad with zeros."""
    count = 8 // planes_of(bits)[0]
    if values.shape[-1] % count:
        values = torch.nn.functional.pad(values, (0, -values.shape[-1] % count))
    return values.view(*values.shape[:-1], count, values.shape[-1] // count)


FORMATS: dict[str, "Format"] = {}  # by name


class Format:
    """Rows of values as a code for each value and a header for each block: attributes, and three functions.

    On the wire a row is its codes, zeros up to a multiple of 16 bytes, its headers, and zeros up to a multiple of 16.
    The last block of a row holds the values that remain, and zeros where blocks are padded. Arithmetic is fp32: bf16
    and fp16 are exact in it, and fp64 is rounded to it first. A block with a NaN or an infinity has codes 0 and a
    header by which it reads as NaN.

    Operators find it by its name.
    """

    bits: int  # of a code, 1 to 8
    header: tuple[torch.dtype, int]  # the numbers that head a block: their dtype, and how many
    padded: bool = False  # the last block of a row is stored like the others; else it ends with the row
    rotated: bool = False  # blocks are rotated before they are measured (`rotation.py`); rows are added rotated
    numbers: tuple[int, ...] = ()  # further numbers that its kernels take as constants
    # A module with the operations, undrawn, for few values, for which calls of torch take too long.
    in_numpy: ModuleType | None = None

    def __init__(self, name: str) -> None:
        self.name = name
        FORMATS[name] = self

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

    def row_bytes(self, n: int, block: int) -> int:
        """Return how many bytes a row of `n` values takes on the wire; `n` may be a symbol of `torch.compile`."""
        if type(n) is int and not torch.compiler.is_compiling():
            return self.layout(n, block).row
        return sum(aligned(size) for size in self._sizes(n, block))

    def _sizes(self, n: int, block: int) -> Iterator[int]:
        """Yield the bytes of the planes of `n` codes, and of their headers. A block begins with a byte."""
        blocks = -(-n // block)
        stored = blocks * block if self.padded else n
        for plane in planes_of(self.bits):
            yield stored // block * block * plane // 8 + -(-(stored % block) * plane // 8)
        yield blocks * self.header_bytes

    @lru_cache(maxsize=4096)  # noqa: B019 formats live as long as the process, and lengths of buckets are few
    def layout(self, n: int, block: int) -> Layout:
        """Return the layout of rows of `n` values."""
        starts, zeros, row = [], [], 0
        for size in self._sizes(n, block):
            starts.append(row)
            row = aligned(row + size)
            zeros += [slice(starts[-1] + size, row)] * (row > starts[-1] + size)
        whole, stride = n // block * block, max(RUN // block, 1) * block
        ends = [(start, min(start + stride, whole), block) for start in range(0, whole, stride)]
        ends += [(whole, n, block if self.padded else n - whole)] * (n > whole)
        *codes_at, header_at = starts
        runs = []
        for start, stop, width in ends:
            height = -(-(stop - start) // width)
            parts = [(header_at + start // block * self.header_bytes, height * self.header_bytes)]
            for at, plane in zip(codes_at, planes_of(self.bits), strict=True):
                parts.append((at + start * plane // 8, height * -(-width * plane // 8)))
            places = tuple(slice(begin, begin + length) for begin, length in parts)
            columns, missing = slice(start, stop), height * width - (stop - start)
            runs.append(Run(columns, width, height, missing, places, self.header[0]))
        return Layout(row, header_at, tuple(zeros), tuple(runs))


def twin_of(format: Format) -> ModuleType:
    """Return the module with the Triton functions of a format, beside that of its definition.

    Raises:
        NotImplementedError: there is none.
    """
    name = f"{type(format).__module__}_gpu"
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:  # a module that it imports
            raise
        raise NotImplementedError(
            f"the format {format!r} has a definition and no Triton functions, which GPUs need: "
            f"write {name}.py, with measure, encode and decode, or keep its tensors on the CPU"
        ) from None
