"""Memory for what a flight needs for a moment, kept by its lane for the next flight.

An allocator of CPU memory gives large blocks back to the system, and taking them anew costs a page fault for every
4 KiB: filling 16 MiB for the first time took five times as long as filling it again (3.6 ms and 0.7 ms, one thread of a
virtual machine), and 65 ms where the machine itself had to be given the memory. CUDA's allocator keeps what it has.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

New = Callable[[Tensor], Tensor]
"""Makes a tensor like another, contiguous and of no particular values."""


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


def _new(like: Tensor) -> Tensor:
    kept, i, nbytes = _rooms.kept, _rooms.taken, like.nbytes
    if kept is None or not like.is_cpu:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    _rooms.taken += 1
    kept.extend(torch.empty(0, dtype=torch.uint8) for _ in range(i + 1 - len(kept)))
    if kept[i].numel() < nbytes:
        kept[i] = torch.empty(nbytes, dtype=torch.uint8)
    return kept[i][:nbytes].view(like.dtype).view(like.shape)
