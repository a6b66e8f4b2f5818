"""The values that have changed, bit for bit: `encode` finds and packs them, `add_` puts them into the old values.

`fold` makes bytes 64 times shorter before they are digested.

Values are words of `size` bytes (1, 2, 4 or 8) in blocks of 4,096, which are 16 lines of 256. In a block

    d     = new − old, modulo 2^(8 size), as a signed integer      0 where nothing has changed
    w     = the least number of bytes that hold every d
    m     = the number of values with d ≠ 0

What is packed of a block begins with places, and then has w bytes of each d: the lowest bytes of all, then the next
ones. The shortest of three kinds is taken, of equal ones the first:

    kind       places                                              bytes           d of
    LINES      the count of each line, then places in lines        16 + m (1 + w)  what has changed; counts below 256
    BITMAP     a bit a value, the lowest first                     512 + m w       what has changed
    ALL        none                                                n w             all n values of the block

A head of a block is m + 2¹⁶ w + 2²⁰ kind, and 0 where nothing has changed. Trained weights in 16 bits move to a
neighbour most of the time, so that d has one byte where the value has two.

This file is the definition; `cpu.py` and `gpu.py` give the same bytes on CPUs and GPUs.
"""

import functools

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...hashing import mixed

BLOCK, LINE = 4096, 256
LINES, BITMAP, ALL = 1, 2, 3
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
BITS = [1 << i for i in range(8)]
ROW = 1024  # bytes
AT_ONCE = 1 << 22  # bytes


def encode(new: Tensor, old: Tensor, size: int) -> tuple[Tensor, list[Tensor]]:
    """Return the heads of all blocks (int32) and pieces of their packed bytes, and copy `new` into `old`, as bytes."""
    pairs = zip(_blocks(new, size), _blocks(old, size), strict=True)
    packed = [_encode_block(a.long(), b.long(), size) for a, b in pairs]
    old.copy_(new)
    heads = torch.tensor([head for head, _ in packed], dtype=torch.int32, device=new.device)
    return heads, [part for _, part in packed]


def _blocks(x: Tensor, size: int) -> tuple[Tensor, ...]:
    return x.view(WORDS[size]).split(BLOCK) if len(x) else ()


def _encode_block(new: Tensor, old: Tensor, size: int) -> tuple[int, Tensor]:
    d = (new - old).to(WORDS[size]).long()
    n, changed = len(d), d != 0
    m = int(changed.sum())
    if m == 0:
        return 0, torch.empty(0, dtype=torch.uint8, device=d.device)
    largest = int((d ^ (d >> 63)).max())  # ~d where d is negative
    w = 1 + sum(largest >= 1 << (8 * bytes - 1) for bytes in range(1, size))
    mask = pad(changed, (0, BLOCK - n))
    counts = mask.view(-1, LINE).sum(1)
    lengths = {LINES: 16 + m * (1 + w), BITMAP: BLOCK // 8 + m * w, ALL: n * w}
    if int(counts.max()) == LINE:
        del lengths[LINES]
    kind = min(lengths, key=lambda each: lengths[each])
    if kind == LINES:
        places = torch.cat([counts, mask.nonzero()[:, 0] % LINE])
    elif kind == BITMAP:
        places = (mask.view(-1, 8) * torch.tensor(BITS, device=d.device)).sum(1)
    else:
        places, m = d.new_empty(0), n
    told = d if kind == ALL else d[changed]
    planes = torch.stack([told >> 8 * byte for byte in range(w)]).view(-1)
    return m + (w << 16) + (kind << 20), (torch.cat([places, planes]) & 255).to(torch.uint8)


def lengths_of(heads: Tensor) -> Tensor:
    """Return how many packed bytes each block has."""
    m, w, kind = parts_of(heads.long())
    places = torch.where(kind == LINES, 16 + m, torch.where(kind == BITMAP, BLOCK // 8, 0))
    return places + m * w


def parts_of(heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return heads & 0xFFFF, heads >> 16 & 15, heads >> 20


def add_(x: Tensor, size: int, heads: Tensor, starts: Tensor, packed: Tensor) -> None:
    """Add packed d to the bytes `x` of the old values; a block's begin at byte `starts` (int64) of `packed`."""
    words = map(Tensor.tolist, (*parts_of(heads), starts))
    for block, m, w, kind, start in zip(_blocks(x, size), *words, strict=True):
        if not kind:
            continue
        part = packed[start:].long()
        if kind == LINES:
            line = torch.repeat_interleave(torch.arange(16, device=x.device), part[:16], output_size=m)
            places, part = line * LINE + part[16 : 16 + m], part[16 + m :]
        elif kind == BITMAP:
            bits = part[: BLOCK // 8, None] & torch.tensor(BITS, device=x.device)
            places, part = bits.view(-1).nonzero()[:, 0], part[BLOCK // 8 :]
        else:
            places = torch.arange(m, device=x.device)
        planes = part[: m * w].view(w, m)
        d = sum((planes[byte] << 8 * byte for byte in range(w)), start=planes.new_zeros(m))
        d = (d << 64 - 8 * w) >> 64 - 8 * w  # the sign
        block[places] = (block[places].long() + d).to(block.dtype)


@functools.cache
def keys() -> Tensor:
    """Return the keys of `fold`: 2 × 256 numbers of 32 bits (int32)."""
    return torch.from_numpy(mixed(np.arange(ROW // 4, dtype=np.uint64)).view(np.int32).reshape(2, -1).copy())


def fold(x: Tensor) -> Tensor:
    """Return two sums (int64) for each KiB of bytes, of which the last is padded with zeros.

    A KiB is 256 words x_j, and a sum is Σ_{j < 128} (x_j + k_j mod 2³²) (x_{j + 128} + k_{j + 128} mod 2³²) mod 2⁶⁴: NH
    (Black et al., UMAC, 1999). Under keys k that were drawn, one that was damaged has the same sums once in 2⁶⁴ times.
    """
    k = keys().to(x.device).long()
    sums = [torch.empty(0, 2, dtype=torch.int64, device=x.device)]
    for part in x.split(AT_ONCE) if len(x) else ():
        words = pad(part, (0, -len(part) % ROW)).clone().view(torch.int32).view(-1, 1, ROW // 4).long()
        a, b = (words + k & 0xFFFFFFFF).chunk(2, -1)
        sums.append((a * b).sum(-1))
    return torch.cat(sums)
