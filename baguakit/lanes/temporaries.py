"""Memory for what a flight needs for a moment, kept by its lane for the next flight.

An allocator of CPU memory gives large blocks back to the system, and taking them anew costs a page fault for every
4 KiB: filling 16 MiB for the first time takes several times as long as filling it again, in virtual machines ten times
and more. CUDA's allocator keeps what it has by itself.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor


class New(Protocol):
    """Makes a tensor shaped as another, of no particular values."""

    def __call__(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor: ...


class _Rooms(threading.local):
    kept: list[Tensor] | None = None  # bytes; None on threads that are no lanes
    taken: int = 0


_rooms = _Rooms()


def keep() -> None:
    """Let this thread keep its temporaries from now on, until it ends."""
    _rooms.kept = []


@contextlib.contextmanager
def temporaries() -> Iterator[New]:
    """Within this block: what makes tensors that nobody uses beyond it.

    with temporaries() as new:
        difference = torch.sub(x, y, out=new(x))
    """
    taken = _rooms.taken
    try:
        yield _new
    finally:
        _rooms.taken = taken


def _new(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    kept, dtype = _rooms.kept, dtype or like.dtype
    if kept is None or not like.is_cpu:
        return torch.empty(like.shape, dtype=dtype, device=like.device)
    i, nbytes = _rooms.taken, like.numel() * dtype.itemsize
    _rooms.taken += 1
    kept.extend(torch.empty(0, dtype=torch.uint8) for _ in range(i + 1 - len(kept)))
    if kept[i].numel() < nbytes:
        kept[i] = torch.empty(nbytes, dtype=torch.uint8)
    return kept[i][:nbytes].view(dtype).view(like.shape)
