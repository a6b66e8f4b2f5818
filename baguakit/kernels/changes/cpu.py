"""Run `cpu.c`, which has the operations of `definition.py` for CPUs: the same bytes."""

import torch
from torch import Tensor

from .. import cpu
from .definition import BLOCK, ROW, keys

SPAN = 64  # blocks that one thread packs
MANY = 16 * SPAN  # blocks that all threads pack before they are moved together


def encode(new: Tensor, old: Tensor, size: int) -> tuple[Tensor, list[Tensor]]:
    heads = torch.empty(-(-len(new) // (BLOCK * size)), dtype=torch.int32)
    ends = torch.empty(MANY // SPAN, dtype=torch.int64)
    many, room, packed = MANY * BLOCK * size, torch.empty(0, dtype=torch.uint8), []
    for x, y, part in zip(new.split(many), old.split(many), heads.split(MANY), strict=True):
        if len(room) < len(x):
            room = torch.empty(min(len(new), 2 * many), dtype=torch.uint8)
        n = len(x) // size
        cpu.call("changes", "changes_encode", x, y, part, room, ends, n, size, cpu.threads(n))
        packed.append(room[: int(ends[0])])
        room = room[int(ends[0]) :]
    return heads, packed


def fold(x: Tensor) -> Tensor:
    sums = torch.empty(-(-len(x) // ROW), 2, dtype=torch.int64)
    threads = cpu.threads(len(x) // 16)  # 16 bytes take as long as a value
    cpu.call("changes", "changes_fold", x, keys(), sums, len(x), threads)
    return sums


def add_(x: Tensor, size: int, heads: Tensor, starts: Tensor, packed: Tensor) -> None:
    n = len(x) // size
    cpu.call("changes", "changes_add", x, heads, starts, packed, n, size, cpu.threads(n))
