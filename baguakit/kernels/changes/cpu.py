"""Run `cpu.c`, which has the operations of `definition.py` for CPUs: the same bytes."""

import torch
from torch import Tensor

from .. import cpu
from .definition import BLOCK

SPAN = 64  # blocks that one thread packs
MANY = 16 * SPAN  # blocks, whose packed bytes may be as long as their values: those of all would need as much memory


def encode(new: Tensor, old: Tensor, size: int) -> tuple[Tensor, list[Tensor]]:
    heads = torch.empty(-(-len(new) // (BLOCK * size)), dtype=torch.int32)
    slots = torch.empty(min(len(heads), MANY) * BLOCK * size, dtype=torch.uint8)
    ends = torch.zeros(MANY // SPAN, dtype=torch.int64)
    packed = []
    many = MANY * BLOCK * size
    for x, y, part in zip(new.split(many), old.split(many), heads.split(MANY), strict=True):
        n = len(x) // size
        cpu.call("changes", "changes_encode", x, y, part, slots, ends, n, size, cpu.threads(n))
        packed.append(slots[: int(ends[0])].clone())
    return heads, packed


def add_(x: Tensor, size: int, heads: Tensor, starts: Tensor, packed: Tensor) -> None:
    n = len(x) // size
    cpu.call("changes", "changes_add", x, heads, starts, packed, n, size, cpu.threads(n))
