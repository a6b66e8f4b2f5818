"""Rows of values in blocks, and blocks in bytes, for the definitions of blockwise formats."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

RUN = 1 << 20  # values that a unit takes at once, about: with fewer, calls cost more than what stays in caches saves


def aligned(count: int) -> int:
    """Round up to 16 bytes, so that every part of a row can be read 16 bytes at a time."""
    return (count + 15) // 16 * 16


def blocks_of(n: int, block: int | None) -> int:
    """How many blocks hold `n` values; without `block`, they are one."""
    return -(-n // (block or max(n, 1)))


def bytes_of(n: int, block: int | None, bits: int) -> int:
    """How many bytes hold the codes of `n` values, of so many bits each; a block begins with a byte."""
    width = block or max(n, 1)
    return n // width * width * bits // 8 + -(-(n % width) * bits // 8)


class Run(NamedTuple):
    """Columns that are blocks of `width` values."""

    columns: slice
    blocks: slice
    width: int

    @property
    def rest(self) -> bool:
        """Whether this is what remains behind the last whole block."""
        return self.blocks.stop is None

    def of(self, values: Tensor) -> Tensor:
        return values[..., self.columns].view(*values.shape[:-1], -1, self.width)

    def codes(self, codes: Tensor, bits: int) -> Tensor:
        start, stop = self.columns.start * bits // 8, -(-self.columns.stop * bits // 8)
        return codes[..., start:stop].view(*codes.shape[:-1], -1, -(-self.width * bits // 8))

    def headers(self, headers: Tensor) -> Tensor:
        return headers[..., self.blocks, :]


def runs_of(n: int, block: int | None) -> Iterator[Run]:
    width = block or max(n, 1)
    whole, stride = n // width * width, max(RUN // width, 1) * width
    for start in range(0, whole, stride):
        stop = min(start + stride, whole)
        yield Run(slice(start, stop), slice(start // width, stop // width), width)
    if n > whole:
        yield Run(slice(whole, n), slice(whole // width, None), n - whole)


# A block of w values with 8 / bits to a byte is cut in as many stripes of ⌈w · bits / 8⌉ values, the last padded with
# zeros, and byte i holds value i of every stripe, the first stripe's lowest. Neighbouring bytes thus hold neighbouring
# values: a thread that reads 16 bytes of values in each stripe writes whole words of codes and shuffles nothing.


def join(codes: Tensor, bits: int) -> Tensor:
    """Codes (…, w) of `bits` each, as uint8, in bytes (…, ⌈w · bits / 8⌉)."""
    if bits == 8:
        return codes
    striped = stripes(codes.int(), bits)
    joined = striped[..., 0, :]
    for i in range(1, 8 // bits):
        joined = joined | striped[..., i, :] << i * bits
    return joined.to(torch.uint8)


def split(joined: Tensor, bits: int) -> Tensor:
    """The codes that `join` made bytes of, in stripes (…, 8 / bits, bytes): uint8, or int32 if a byte holds several."""
    if bits == 8:
        return joined.unsqueeze(-2)
    shifts = torch.arange(0, 8, bits, device=joined.device, dtype=torch.int32).unsqueeze(-1)
    return (joined.unsqueeze(-2).int() >> shifts) & (1 << bits) - 1


def stripes(values: Tensor, bits: int) -> Tensor:
    """Values (…, w) in the stripes of their codes, (…, 8 / bits, ⌈w · bits / 8⌉): a view, or filled up with zeros."""
    count = 8 // bits
    if values.shape[-1] % count:
        values = torch.nn.functional.pad(values, (0, -values.shape[-1] % count))
    return values.view(*values.shape[:-1], count, values.shape[-1] // count)
