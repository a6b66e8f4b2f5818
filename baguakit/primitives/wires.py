"""How packed rows travel between all ranks: as collectives over NCCL, as messages over gloo."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..comm import Comm, rotated


class Collectives:
    """Rows over NCCL: its own stream orders the collectives, and the lane's stream waits for them."""

    def __init__(self, comm: Comm, incoming: Sequence[Tensor]) -> None:
        self.comm, self.incoming = comm, incoming
        self.works: dict[int, Any] = {}

    def scatter(self, tag: int, rows: Tensor) -> None:
        """Send row r of `rows` to rank r, as row of this rank in what `tag` brings it."""
        self.works[tag] = self.comm.all_to_all_later(self.incoming[tag], rows)

    def gather(self, tag: int, row: Tensor) -> None:
        """Send `row` (1, bytes) to every rank, as row of this rank in what `tag` brings it."""
        self.works[tag] = self.comm.all_gather_later(self.incoming[tag], row)

    def arrived(self, tag: int) -> Tensor:
        """What `tag` brought: row r came from rank r."""
        self.works[tag].wait()
        return self.incoming[tag]

    def close(self) -> None:
        """Wait until whatever was sent may be overwritten."""


class Messages:
    """The same over gloo: every receive is posted before any send, and ranks send in rotated order."""

    def __init__(self, comm: Comm, incoming: Sequence[Tensor]) -> None:
        self.comm, self.incoming = comm, incoming
        self.peers = rotated(set(range(comm.size)) - {comm.rank}, comm.rank)
        self.sends: list[Any] = []
        comm.settled()
        self.receives = [[comm.receive_later(rows[p], p, tag) for p in self.peers] for tag, rows in enumerate(incoming)]

    def scatter(self, tag: int, rows: Tensor) -> None:
        self.sends += [self.comm.send_later(rows[p], p, tag) for p in self.peers]
        self.incoming[tag][self.comm.rank].copy_(rows[self.comm.rank])

    def gather(self, tag: int, row: Tensor) -> None:
        self.sends += [self.comm.send_later(row[0], p, tag) for p in self.peers]
        self.incoming[tag][self.comm.rank].copy_(row[0])

    def arrived(self, tag: int) -> Tensor:
        for work in self.receives[tag]:
            work.wait()
        return self.incoming[tag]

    def close(self) -> None:
        for work in self.sends:
            work.wait()


def wire(comm: Comm, incoming: Sequence[Tensor]) -> Collectives | Messages:
    """What moves rows into the tensors `incoming` (size, bytes), each named by its place as `tag`.

    Every rank makes it with as many and as large ones; each is scattered or gathered once.
    """
    return Collectives(comm, incoming) if incoming[0].is_cuda else Messages(comm, incoming)
