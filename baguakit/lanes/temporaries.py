"""Memory for the temporary tensors of a flight, kept by its lane for the next flight.

An allocator of CPU memory returns large blocks to the system, and taking them again costs a page fault for every
4 KiB: filling 16 MiB for the first time took five times as long as filling it again (3.6 ms and 0.7 ms, one thread of a
virtual machine), and 65 ms where the virtual machine itself had to get the memory. CUDA's allocator keeps its blocks.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

New = Callable[[Tensor], Tensor]
"""Makes a tensor like another, contiguous and uninitialised."""


class _Memory(threading.local):
    kept: list[Tensor] | None = None  # bytes; None on threads without a lane
    taken: int = 0


_memory = _Memory()


def keep() -> None:
    """Let this thread keep its temporaries from now on, until it ends."""
    _memory.kept = []


@contextlib.contextmanager
def temporaries() -> Iterator[New]:
    """Yield a function that makes tensors for use within this block only.

    with temporaries() as new:
        difference = torch.sub(x, y, out=new(x))
    """
    taken = _memory.taken
    try:
        yield _new
    finally:
        _memory.taken = taken


def _new(like: Tensor) -> Tensor:
    kept, i, nbytes = _memory.kept, _memory.taken, like.nbytes
    if kept is None or not like.is_cpu:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    _memory.taken += 1
    kept.extend(torch.empty(0, dtype=torch.uint8) for _ in range(i + 1 - len(kept)))
    if kept[i].numel() < nbytes:
        kept[i] = torch.empty(nbytes, dtype=torch.uint8)
    return kept[i][:nbytes].view(like.dtype).view(like.shape)
