"""Packets between the ranks of a `Comm`: rank 0 publishes, and each other rank passes on what comes to the next.

The bytes go along the chain 0, 1, 2 … in pieces, so that all links work at once: with n ranks, S bytes and pieces of P
bytes, the last rank has them after (S + (n − 2) P) / B, which hardly depends on n.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..comm import Comm, device_of

PIECE = 1 << 20  # bytes


class Group:
    """The versions that rank 0 of a Comm publishes; `most` is the number of bytes of changes that it keeps."""

    def __init__(self, comm: Comm, most: float, publishes: bool) -> None:
        if publishes != (comm.rank == 0):
            raise ValueError(f"rank 0 of a Comm has the Publisher, and every other a Subscriber; this is {comm.rank}")
        self.comm, self.most, self.publishes = comm, most, publishes
        self.log: dict[int, Tensor] = {}  # changes by the version that they lead to

    def begin(self) -> int:
        return -1

    def moved(self, comm: Comm) -> "Group":
        there = Group(comm, self.most, self.publishes)
        there.log = self.log
        return there

    def add(self, packet: Tensor, run: str, version: int, whole: bool, copy: Callable[[], Tensor]) -> None:
        """Send what leads to this version from the oldest that a rank has; the whole copy if that is not kept."""
        self.log |= {} if whole else {version: packet}
        while sum(map(len, self.log.values())) > self.most:
            del self.log[min(self.log)]
        oldest = min(v if r == run else -1 for v, r in self.comm.gather_objects([version, run], plain=True))
        wanted = range(oldest + 1, version + 1)
        if whole or oldest < 0:
            self._along([packet if whole else copy()])
        else:
            self._along([self.log[each] for each in wanted] if self.log.keys() >= set(wanted) else [copy()])

    def packets_after(self, version: int, run: str) -> list[tuple[str, Tensor]]:
        """Return the packets that come from rank 0, and pass them on."""
        self.comm.gather_objects([version, run], plain=True)
        return [("from rank 0", packet) for packet in self._along([])]

    def _along(self, packets: list[Tensor]) -> list[Tensor]:
        comm, here = self.comm, device_of(self.comm.group)
        sizes = comm.broadcast_object(list(map(len, packets)))
        whole = torch.cat(packets).to(here) if packets else torch.empty(sum(sizes), dtype=torch.uint8, device=here)
        pieces = list(enumerate(whole.split(PIECE)))
        coming = [comm.receive_later(piece, comm.rank - 1, i) for i, piece in pieces if comm.rank > 0]
        going = []
        for i, piece in pieces:
            if coming:
                coming[i].wait()
            if comm.rank < comm.size - 1:
                going.append(comm.send_later(piece, comm.rank + 1, i))
        for each in going:
            each.wait()
        return list(whole.cpu().split(sizes))
