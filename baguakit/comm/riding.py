"""Flags that ride with an exchange that flies anyway: on a GPU a collective of their own takes its latency."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LONGEST = 1 << 16  # bytes that all ranks' flags may add to an all-gather; an all-reduce of their own adds fewer


class Rider:
    """Bytes of which each rank has a row, and whose maximum over all ranks is asked for.

    The first all-gather of a flight within the group takes them along; or the first between nodes, and the first
    within them. What no gather has taken is all-reduced at the end.

    Attributes:
        rows: the rows (k, bytes) of the ranks that are reached so far, uint8.
    """

    def __init__(self, mine: Tensor, size: int) -> None:
        self.rows, self._size, self._parts = mine.view(1, -1), size, set[str]()

    def aboard(self, comm: Any) -> Any:
        """Return the same `Comm` for one flight, which takes these flags along."""
        return comm._copied(_rider=self)

    def boards(self, part: str, size: int) -> tuple[Tensor, Tensor] | None:
        """Return what to gather to and from with the ranks of a part of the group; None if they stay where they are."""
        rows = size * len(self.rows)
        if part in self._parts or rows > self._size or rows * self.rows.shape[1] > LONGEST:
            return None
        self._parts.add(part)
        out, mine = self.rows.new_empty(rows, self.rows.shape[1]), self.rows
        self.rows = out
        return out, mine

    def arrive(self, comm: Any) -> None:
        """Send what has not reached all ranks. Collective."""
        if len(self.rows) < self._size:
            comm.all_reduce(self.rows, dist.ReduceOp.MAX)


def gather_with(pair: tuple[Tensor, Tensor], out: Tensor, x: Tensor, group: Any) -> Any:
    """Begin to gather `x` of all ranks in `out`, and in the same launch a pair of such tensors; return the work."""
    outs, given = zip(*((each.view(-1).view(torch.uint8) for each in both) for both in ((out, x), pair)), strict=True)
    return group.allgather_into_tensor_coalesced(list(outs), list(given))
