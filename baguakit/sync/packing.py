"""Pack what differs between two tensors, and put it into the older one. No bit is lost, whatever the dtype.

bytes      what
0 – 15     a digest of all bytes behind it: SHA-1 of their `fold` (kernels/changes) and their number (int64)
16 – 23    n, the number of words, as an integer, lowest byte first
24         the bytes of a word: those of a value, and 8 for a value of 16
25         the version of this format, 2
32 –       a bit for each block of 4,096 words, whether it has changed; padded to a multiple of 4 bytes
then       the heads of the changed blocks, of 4 bytes; then what is packed of each (kernels/changes)
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

from ..arguments import checked, describe, package, tensor
from ..kernels.changes import definition as blocks
from ..kernels.operators import home_of
from ..tensors import bytes_of, check_apart, plain
from .streams import bytes_in, integer_of

DIGEST, HEADER, FORMAT = 16, 32, 2
Parts = tuple[Tensor, Tensor, Tensor]


@checked
@torch.no_grad()
def changes(new: Tensor, old: Tensor) -> Tensor:
    """Pack the values of `new` that differ from `old` in any bit, and copy them into `old`.

    Args:
        new: a tensor of any dtype, shape and strides.
        old: a tensor of the same shape and dtype on the same device, with any strides.

    Returns:
        Bytes (uint8) on that device, at most 0.2 % and 64 bytes longer than the values. `apply_` takes them.
    """
    tensor("new", new), tensor("old", old)
    check_apart({"old": old})
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise ValueError(f"old is a tensor like new, {describe(new)}; it is {describe(old)}")
    size, whole = min(new.itemsize, 8), plain(old)
    there = bytes_of(whole)
    heads, packed = home_of(there, "changes", whole).encode(bytes_of(plain(new)), there, size)
    if whole is not old:
        old.copy_(whole)
    told = heads.cpu().numpy()
    changed = np.zeros(-(-len(told) // 32) * 32, bool)
    np.not_equal(told, 0, out=changed[: len(told)])
    start = np.array([new.nbytes // size, size + 256 * FORMAT], np.int64)
    parts = start.view(np.uint8), np.packbits(changed, bitorder="little"), told[changed[: len(told)]].view(np.uint8)
    return sealed(torch.from_numpy(np.concatenate(parts)).to(new.device), *packed)


@checked
@torch.no_grad()
def apply_(x: Tensor, packed: Tensor) -> Tensor:
    """Turn the older values `x` into the newer ones, given what `changes` packed of them; return `x`.

    Args:
        x: bit for bit what `old` was, with any strides.
        packed: bytes (uint8), on the device of `x`.

    Raises:
        ValueError: the bytes are damaged, or belong to a tensor of another size or dtype; `x` is as it was.
    """
    tensor("x", x), tensor("packed", packed, dtype=torch.uint8)
    check_apart({"x": x})
    return add_(x, read(packed, x))


@torch.no_grad()
def add_(x: Tensor, parts: Parts, sign: int = 1) -> Tensor:
    """Add packed differences to the values of `x`, or subtract them: −(−x + d)."""
    whole = plain(x)
    there, size = bytes_of(whole), min(x.itemsize, 8)
    words = there.view(blocks.WORDS[size]) if sign < 0 else there[:0]
    words.neg_()
    home_of(there, "changes", whole).add_(there, size, *parts)
    words.neg_()
    return x if whole is x else x.copy_(whole)


def read(packed: Tensor, x: Tensor) -> Parts:
    """Return the heads of all blocks, where what is packed of each begins, and its bytes; raises as `apply_`."""
    body = opened(packed)
    words, size = integer_of(body[:8]), min(x.itemsize, 8)
    if (words, int(body[8]), int(body[9])) != (x.nbytes // size, size, FORMAT):
        raise ValueError(f"packed has the changes of {words} values of {int(body[8])} bytes; x is {describe(x)}")
    count = -(-words // blocks.BLOCK)
    at = HEADER - DIGEST + -(-count // 32) * 4
    changed = np.unpackbits(body[HEADER - DIGEST : at].cpu().numpy(), count=count, bitorder="little").astype(bool)
    end = at + 4 * int(changed.sum())
    told = np.zeros(count, np.int32)
    told[changed] = body[at:end].cpu().numpy().view(np.int32)
    heads = torch.from_numpy(told).to(x.device)
    lengths = blocks.lengths_of(heads)
    if int(lengths.sum()) != len(body) - end:
        raise ValueError(f"packed is {len(packed)} bytes long, {int(lengths.sum()) + end + DIGEST} are right")
    return heads, lengths.cumsum(0) - lengths, body[end:].contiguous()


def sealed(*body: Tensor) -> Tensor:
    """Return bytes behind their digest."""
    packed = torch.cat([body[0].new_empty(DIGEST), *body])
    packed[:DIGEST] = bytes_in(digest_of(packed[DIGEST:]))
    return packed


def opened(packed: Tensor) -> Tensor:
    """Return the bytes behind a digest; raise a ValueError unless it is theirs."""
    if packed.dim() != 1 or len(packed) < HEADER or bytes(packed[:DIGEST].tolist()) != digest_of(packed[DIGEST:]):
        raise ValueError(f"packed, {describe(packed)}, is damaged, or of another version of baguakit")
    return packed[DIGEST:]


def digest_of(x: Tensor) -> bytes:
    sums = home_of(x, "changes").fold(x).cpu().numpy().tobytes()
    return hashlib.sha1(sums + len(x).to_bytes(8, "little"), usedforsecurity=False).digest()[:DIGEST]


def shorter(x: Tensor, level: int) -> Tensor:
    """Return bytes compressed by zstd, behind the digest of these."""
    return sealed(bytes_in(package("zstandard", "zstd=").ZstdCompressor(level=level).compress(x.cpu().numpy())))


def longer(x: Tensor) -> Tensor:
    zstandard = package("zstandard", "a Subscriber to a Publisher with zstd=")
    return bytes_in(zstandard.ZstdDecompressor().decompress(opened(x).numpy()))
