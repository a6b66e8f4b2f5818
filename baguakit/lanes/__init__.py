"""Lanes: where work flies while training goes on. A CUDA stream; on CPU, a thread.

Work put on a lane runs in the order in which it was put there. `Flight` is one piece of it under way.
"""

import weakref
from typing import Any

import torch

from .base import Flight, Lane
from .cpu import CpuLane
from .cuda import CudaLane, current_stream
from .moments import Moment, between, moment, passed, reader
from .temporaries import New, temporaries

__all__ = [
    "CpuLane",
    "CudaLane",
    "Flight",
    "Lane",
    "Moment",
    "New",
    "between",
    "current_stream",
    "lane",
    "lane_of",
    "moment",
    "passed",
    "reader",
    "temporaries",
]


def lane(device: torch.device, name: str = "baguakit lane") -> Lane:
    """A new lane for tensors on `device`."""
    return CudaLane(device) if device.type == "cuda" else CpuLane(name)


_lanes: "weakref.WeakKeyDictionary[Any, dict[torch.device, Lane]]" = weakref.WeakKeyDictionary()


def lane_of(group: Any, device: torch.device) -> Lane:
    """The lane on which work launched by hand in `group` flies: one for each device, so that its order is kept."""
    lanes = _lanes.setdefault(group, {})
    if device not in lanes:
        made = lanes[device] = lane(device)
        if isinstance(made, CpuLane):
            weakref.finalize(group, made.close, False)
    return lanes[device]
