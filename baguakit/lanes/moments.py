"""Moments: seconds of `time.perf_counter`, or on CUDA an event in a stream.

An event is waited for only when its time is read.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

Moment = Any


def moment(device: torch.device) -> Moment:
    """Return the current moment of the host or of the current stream of `device`, without waiting."""
    if device.type != "cuda":
        return time.perf_counter()
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))


def passed(when: Moment) -> bool:
    """Return True if a moment has passed, so that `between` does not wait for it."""
    return isinstance(when, float) or bool(when.query())


def between(a: Moment, b: Moment) -> float:
    """Return the seconds from one moment to another of the same device. Waits until both have passed."""
    if isinstance(a, float):
        return float(b - a)
    for event in (a, b):
        event.synchronize()
    return float(a.elapsed_time(b)) / 1e3


def reader(device: torch.device) -> Callable[[Moment], float]:
    """Return a function from moments of a device to seconds of `time.perf_counter`; synchronises on CUDA.

    An event is read by its distance to one whose host time is known: this one, because CUDA gives distances in fp32
    milliseconds, 8 µs apart at 100 s.
    """
    if device.type != "cuda":
        return float
    torch.cuda.synchronize(device)
    now = moment(device)
    now.synchronize()
    host = time.perf_counter()
    return lambda when: host - between(when, now)
