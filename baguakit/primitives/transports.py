"""Transports of rows between all ranks, and of messages between some: over NCCL collectives, over gloo messages."""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..comm import Comm, rotated

Held = TypeVar("Held")
Rows = Tensor | Sequence[Tensor]  # of bytes, one for each rank


class NcclRows:
    """Rows over NCCL: its own stream orders the collectives, and the lane's stream waits for them."""

    def __init__(self, comm: Comm, incoming: Sequence[Tensor]) -> None:
        self.comm, self.incoming = comm, incoming
        self.works: dict[int, Any] = {}

    def scatter(self, tag: int, rows: Rows) -> None:
        """Send row r of `rows` to rank r, as row of this rank in what `tag` brings it."""
        together = rows if isinstance(rows, Tensor) else torch.stack(list(rows))
        self.works[tag] = self.comm.all_to_all_later(self.incoming[tag], together)

    def gather(self, tag: int, row: Tensor) -> None:
        """Send `row` (1, bytes) to every rank, as row of this rank in what `tag` brings it."""
        self.works[tag] = self.comm.all_gather_later(self.incoming[tag], row)

    def arrived(self, tag: int) -> Tensor:
        """Return the rows that `tag` brought: row r came from rank r."""
        self.works[tag].wait()
        return self.incoming[tag]

    def close(self) -> None:
        """Wait until all that was sent may be overwritten: this is so already."""


class Gloo(Generic[Held]):
    """Messages under way over gloo. Every receive is posted before any send, each by its `tag`."""

    incoming: Sequence[Held]
    sends: list[Any]
    receives: list[list[Any]]  # by tag

    def arrived(self, tag: int) -> Held:
        """Return all that came under `tag`: row r from rank r, or the messages by the rank that sent them."""
        for work in self.receives[tag]:
            work.wait()
        return self.incoming[tag]

    def close(self) -> None:
        """Wait until all that was sent may be overwritten."""
        for work in self.sends:
            work.wait()


class GlooRows(Gloo[Tensor]):
    """Rows over gloo: every rank sends a message to every other."""

    def __init__(self, comm: Comm, incoming: Sequence[Tensor]) -> None:
        self.comm, self.incoming, self.rank, size = comm, incoming, comm.rank, comm.size
        self.peers = [*range(self.rank + 1, size), *range(self.rank)]
        self.sends, self.receives = [], []
        comm.settled()
        for tag, rows in enumerate(incoming):
            self.receives.append([comm.receive_later(rows[peer], peer, tag) for peer in self.peers])

    def scatter(self, tag: int, rows: Rows) -> None:
        """Send row r of `rows` to rank r, as row of this rank in what `tag` brings it."""
        for peer in self.peers:
            self.sends.append(self.comm.send_later(rows[peer], peer, tag))
        self.incoming[tag][self.rank].copy_(rows[self.rank])

    def gather(self, tag: int, row: Tensor) -> None:
        """Send `row` (1, bytes) to every rank, as row of this rank in what `tag` brings it."""
        self.scatter(tag, row.expand(len(self.peers) + 1, -1))


class GlooMessages(Gloo[dict[int, Tensor]]):
    """Messages to some ranks and from some, over gloo."""

    def __init__(self, comm: Comm, incoming: Sequence[dict[int, Tensor]]) -> None:
        self.comm, self.incoming = comm, incoming
        self.sends = []
        comm.settled()
        self.receives = [[comm.receive_later(x, p, tag) for p, x in each.items()] for tag, each in enumerate(incoming)]

    def send(self, tag: int, outgoing: Mapping[int, Tensor]) -> None:
        """Begin to send each rank the tensor that `outgoing` has for it."""
        self.sends += [self.comm.send_later(outgoing[p], p, tag) for p in rotated(outgoing, self.comm.rank)]


class NcclMessages:
    """Messages over NCCL, which pairs sends with receives only within one call of the whole group."""

    def __init__(self, comm: Comm, incoming: Sequence[dict[int, Tensor]], device: torch.device) -> None:
        self.comm, self.incoming, self.device = comm, incoming, device

    def send(self, tag: int, outgoing: Mapping[int, Tensor]) -> None:
        """Send each rank the tensor that `outgoing` has for it, and receive what others send under this tag."""
        self.comm.exchange_each(outgoing, self.incoming[tag], self.device)

    def arrived(self, tag: int) -> dict[int, Tensor]:
        """Return the messages that came under `tag`, by the rank that sent them."""
        return self.incoming[tag]

    def close(self) -> None:
        """Wait until all that was sent may be overwritten: this is so already."""


def row_transport(comm: Comm, incoming: Sequence[Tensor]) -> NcclRows | GlooRows:
    """Return the transport of rows into the tensors `incoming` (size, bytes), each named by its index as `tag`.

    Every rank makes it with as many and as large ones; each is scattered or gathered once.
    """
    return NcclRows(comm, incoming) if incoming[0].is_cuda else GlooRows(comm, incoming)


def message_transport(
    comm: Comm, incoming: Sequence[dict[int, Tensor]], device: torch.device
) -> NcclMessages | GlooMessages:
    """Return the transport of messages into the tensors `incoming`, {rank: tensor}, each set named by its index.

    All ranks create it with the same number of sets and send each tag exactly once, even to nobody.
    """
    return NcclMessages(comm, incoming, device) if device.type == "cuda" else GlooMessages(comm, incoming)
