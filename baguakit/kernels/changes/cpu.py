"""Run `cpu.c`, which has the operations of `definition.py` for CPUs: the same bytes."""

import torch
from torch import Tensor

from .. import cpu
from .definition import BLOCK, lengths_of

SPAN = 64  # blocks


def encode(new: Tensor, old: Tensor, size: int) -> tuple[Tensor, Tensor]:
    n = len(new) // size
    heads = torch.empty(-(-n // BLOCK), dtype=torch.int32)
    slots = torch.empty(len(heads) * BLOCK * size, dtype=torch.uint8)
    cpu.call("changes", "changes_encode", new, old, heads, slots, n, size, cpu.threads(n))
    spans = zip(slots.split(SPAN * BLOCK * size), lengths_of(heads).split(SPAN), strict=False)
    return heads, torch.cat([slots[:0], *(span[: int(lengths.sum())] for span, lengths in spans)])


def add_(x: Tensor, size: int, heads: Tensor, starts: Tensor, packed: Tensor) -> None:
    n = len(x) // size
    cpu.call("changes", "changes_add", x, heads, starts, packed, n, size, cpu.threads(n))
