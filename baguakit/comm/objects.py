"""Python objects between the ranks of a group: methods of `Comm`.

`dist.all_gather_object` and `dist.broadcast_object_list` are not used: with TORCH_DISTRIBUTED_DEBUG=DETAIL they know
only groups that torch made.
"""

import json
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import integer, truth
from .groups import all_gather_single


def gather_objects(self: Any, value: Any, plain: bool = False) -> list[Any]:
    """Return the picklable `value` of every rank; if `plain`, one of JSON, which runs no code where it is read."""
    truth("plain", plain)
    if self.size == 1:
        return [value]
    group, there = self.group, _device(self.group)
    mine = _as_tensor(json.dumps(value).encode() if plain else pickle.dumps(value))
    load: Any = json.loads if plain else pickle.loads
    sizes = torch.empty(self.size, dtype=torch.int64, device=there)
    all_gather_single(sizes, torch.tensor([mine.numel()], device=there), group=group)
    counts = sizes.tolist()
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    landed = torch.empty(len(counts) * len(padded), dtype=torch.uint8, device=there)
    all_gather_single(landed, padded.to(there), group=group)
    rows = landed.cpu().view(len(counts), -1)
    return [load(row[:count].numpy().tobytes()) for row, count in zip(rows, counts, strict=True)]


def broadcast_object(self: Any, value: Any, source: int = 0) -> Any:
    """Return the picklable `value` of rank `source`; those of other ranks are not read."""
    integer("source", source, 0, self.size - 1)
    if self.size == 1:
        return value
    group, there = self.group, _device(self.group)
    mine = _as_tensor(pickle.dumps(value if self.rank == source else None))
    size = torch.tensor([mine.numel()], device=there)
    dist.broadcast(size, group=group, group_src=source)
    if self.rank != source:
        mine = torch.empty(int(size), dtype=torch.uint8)
    landed = mine.to(there)
    dist.broadcast(landed, group=group, group_src=source)
    return pickle.loads(landed.cpu().numpy().tobytes())


def _device(group: Any) -> torch.device:
    kinds = {each.type for each in group._device_types}
    return torch.device("cpu") if "cpu" in kinds else torch.device("cuda", torch.cuda.current_device())


def _as_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
