"""Blockwise formats: the layout of packed rows in blocks and bytes, and the interface of a format."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

RUN = 1 << 20  # the approximate number of values that the definition takes at once, which bounds its memory


def aligned(count: int) -> int:
    """Return `count` rounded up to a multiple of 16: each part of a row can then be read 16 bytes at a time."""
    return (count + 15) // 16 * 16


# The bits of each plane of a code, by its bits: powers of two that add up to them, such as (4, 1) for 5.
PLANES = tuple(tuple(plane for plane in (8, 4, 2, 1) if bits & plane) for bits in range(16))


class Run(NamedTuple):
    """Adjacent blocks of one width."""

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
        """Return views of this run in packed rows: headers (…, blocks, numbers per header), and codes by plane."""
        headers, *codes = [rows[..., part].unflatten(-1, (self.height, -1)) for part in self.bytes]
        return [headers.view(self.dtype), *codes]


class Layout(NamedTuple):
    """The bytes of a packed row: the planes of codes, then the headers. A part is padded to a multiple of 16 bytes."""

    row: int  # the number of bytes
    planes_at: tuple[int, ...]  # where the planes of codes begin
    header_at: int  # where the headers begin
    zeros: tuple[slice, ...]  # the bytes that no code or header fills
    runs: tuple[Run, ...]  # the blocks of a row, whole ones first

    def empty(self, rows: int, device: torch.device) -> Tensor:
        """Return a tensor for packed rows: the padding is zero, all other bytes are uninitialised."""
        packed = torch.empty(rows, self.row, dtype=torch.uint8, device=device)
        for part in self.zeros:
            packed[:, part].zero_()
        return packed


# With 1, 2, 4 or 8 bits a code, a byte holds 8 / bits codes. A block of w values is cut in 8 / bits stripes of
# ⌈w · bits / 8⌉ values; the last stripe is padded with zeros. Byte i holds the i-th code of every stripe; the code of
# the first stripe is in the lowest bits. So adjacent bytes hold adjacent values: a thread that reads 16 bytes of each
# stripe writes whole words of codes. Codes of 3, 5, 6 or 7 bits are cut in planes of 4, 2 and 1 bits, from the lowest.


def join_(planes: Sequence[Tensor], codes: Tensor, bits: int) -> None:
    """Write codes (…, w) with `bits` bits each to `planes`: bytes (…, ⌈w · p / 8⌉) for a plane of p bits."""
    shift = 0
    for bytes_, plane in zip(planes, PLANES[bits], strict=True):
        striped = stripes((codes >> shift).to(torch.uint8) & (1 << plane) - 1, plane)
        joined = striped[..., 0, :]
        for i in range(1, 8 // plane):
            joined = joined | striped[..., i, :] << i * plane
        bytes_.copy_(joined)
        shift += plane


def split(planes: Sequence[Tensor], bits: int, width: int) -> Tensor:
    """Return the codes (…, width) in planes; as uint8 if they have up to eight bits, else int32."""
    codes, shift = torch.zeros((), dtype=torch.uint8 if bits <= 8 else torch.int32, device=planes[0].device), 0
    for bytes_, plane in zip(planes, PLANES[bits], strict=True):
        striped = [bytes_ >> at & (1 << plane) - 1 for at in range(0, 8, plane)]
        codes = codes | torch.cat(striped, -1)[..., :width].to(codes.dtype) << shift
        shift += plane
    return codes


def stripes(values: Tensor, plane: int) -> Tensor:
    """Return values (…, w), padded with zeros, as the stripes (…, count, width) of a plane of `plane` bits."""
    count = 8 // plane
    if values.shape[-1] % count:
        values = torch.nn.functional.pad(values, (0, -values.shape[-1] % count))
    return values.view(*values.shape[:-1], count, values.shape[-1] // count)


FORMATS: dict[str, "Format"] = {}  # by name


class Format:
    """A format with a code for each value and a header for each block. Subclasses set attributes and define 3 methods.

    On the wire a row is its codes, plane by plane, and then its headers; each part is padded with zeros to a multiple
    of 16 bytes. The last block of a row holds the remaining values, and then zeros if `padded`. Arithmetic is fp32:
    bf16 and fp16 convert exactly, and fp64 is rounded first. A block with a NaN or an infinity has codes 0 and a header
    that makes all its values NaN.

    Operators look up a format by its name.
    """

    bits: int  # of a code, 1 to 8
    header: tuple[torch.dtype, int]  # the numbers that head a block: their dtype, and how many
    padded: bool = False  # the last block of a row is stored like the others; else it ends with the row
    rotated: bool = False  # blocks are rotated before they are measured (`rotation.py`); rows are added rotated
    numbers: tuple[int, ...] = ()  # further numbers that its kernels take as constants

    def __init__(self, name: str) -> None:
        self.name = name
        FORMATS[name] = self

    def __repr__(self) -> str:
        return self.name

    def measure(self, x: Tensor, drawn: bool) -> tuple[Tensor, Tensor]:
        """Return the headers of blocks (…, width), and the factors (…, 1) that turn values into levels.

        `drawn` tells whether values will be rounded at random. A block with a NaN or an infinity has the factor NaN.
        """
        raise NotImplementedError

    def encode(self, x: Tensor, header: Tensor, scale: Tensor, draw: Tensor | None) -> Tensor:
        """Return the code of each value, as uint8. To round at random, `draw` has a number in [0, 1) for each value."""
        raise NotImplementedError

    def decode(self, codes: Tensor, header: Tensor) -> Tensor:
        """Return the value of each code, in fp32."""
        raise NotImplementedError

    @property
    def header_bytes(self) -> int:
        """Return the number of bytes of a header."""
        return self.header[0].itemsize * self.header[1]

    def row_bytes(self, n: int, block: int) -> int:
        """Return the number of bytes of a packed row of `n` values; `n` may be a symbol of `torch.compile`."""
        if type(n) is int and not torch.compiler.is_compiling():
            return self.layout(n, block).row
        return sum(aligned(size) for size in self._sizes(n, block))

    def _sizes(self, n: int, block: int) -> Iterator[int]:
        """Yield how many bytes each plane of `n` codes takes, then how many the headers take."""
        blocks = -(-n // block)
        stored = blocks * block if self.padded else n
        for plane in PLANES[self.bits]:
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
            for at, plane in zip(codes_at, PLANES[self.bits], strict=True):
                parts.append((at + start * plane // 8, height * -(-width * plane // 8)))
            places = tuple(slice(begin, begin + length) for begin, length in parts)
            columns, missing = slice(start, stop), height * width - (stop - start)
            runs.append(Run(columns, width, height, missing, places, self.header[0]))
        return Layout(row, tuple(codes_at), header_at, tuple(zeros), tuple(runs))


def twin_of(format: Format) -> ModuleType:
    """Return the module with the Triton functions of a format; raise a NotImplementedError if there is none."""
    name = f"{type(format).__module__}_gpu"
    if find_spec(name) is None:
        raise NotImplementedError(
            f"the format {format!r} has a definition and no Triton functions, which GPUs need: "
            f"write {name.replace('.', '/')}.py, with measure, encode and decode, or keep its tensors on the CPU"
        )
    return import_module(name)
