"""Lanes: a lane is a CUDA stream or a thread, on which work overlaps with training.

A lane runs its work in the order of the launches. A `Flight` is one piece of launched work.
"""

import weakref
from typing import Any

import torch

from .base import Flight, Lane, Moment, New, Phases, between, current_stream, moment, passed, reader, temporaries
from .cpu import CpuLane, whole
from .cuda import CudaLane

__all__ = [
    "CpuLane", "CudaLane", "Flight", "Lane", "Moment", "New", "Phases", "between", "current_stream",
    "lane", "lane_of", "moment", "passed", "reader", "temporaries", "whole",
]  # fmt: skip


def lane(device: torch.device, name: str = "baguakit lane", by_host: bool = False) -> Lane:
    """Return a new lane for tensors on `device`. With `by_host`, its work sends them from the memory of the host."""
    return CpuLane(name, device) if by_host or device.type != "cuda" else CudaLane(device)


_lanes: "weakref.WeakKeyDictionary[Any, dict[torch.device, Lane]]" = weakref.WeakKeyDictionary()


def lane_of(group: Any, device: torch.device, by_host: bool = False) -> Lane:
    """Return the lane for work that the user launches in `group`: one per device, to keep the order of launches."""
    lanes = _lanes.setdefault(group, {})
    if device not in lanes:
        made = lanes[device] = lane(device, by_host=by_host)
        if isinstance(made, CpuLane):
            weakref.finalize(group, made.close, False)
    return lanes[device]
