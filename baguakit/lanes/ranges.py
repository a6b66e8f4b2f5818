"""The ranges of a flight in a profiler: its launch and its wait where they happen, and its work on the lane's thread.

On CPU that is a thread of its own, and `torch.profiler` looks there if it is told to profile all threads. No range is
opened on one thread and closed on another: a flight may outlive a profiler, and with it what the range would write to.
"""

import contextlib
from typing import Any

from torch.autograd import profiler

_NO_RANGE: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def in_profile(what: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """A range in the profiler that is at work, if any is and there is a name."""
    # Asked first, because a range costs microseconds even when nobody records it.
    if not name or not getattr(profiler, "_is_profiler_enabled", True):
        return _NO_RANGE
    return profiler.record_function(f"baguakit: {what} {name}" if what else f"baguakit: {name}")
