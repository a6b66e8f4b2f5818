"""How packed rows travel, between all ranks or some: as collectives over NCCL, as messages over gloo."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
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
        """Return the rows that `tag` brought: row r came from rank r."""
        self.works[tag].wait()
        return self.incoming[tag]

    def close(self) -> None:
        """Wait until whatever was sent may be overwritten."""


class Messages:
    """The same over gloo: every rank writes to every other."""

    def __init__(self, comm: Comm, incoming: Sequence[Tensor]) -> None:
        self.rank, self.incoming = comm.rank, incoming
        self.peers = [(comm.rank + i) % comm.size for i in range(1, comm.size)]
        self.letters = Letters(comm, [{p: rows[p] for p in self.peers} for rows in incoming])

    def scatter(self, tag: int, rows: Tensor) -> None:
        self.letters.send(tag, {p: rows[p] for p in self.peers})
        self.incoming[tag][self.rank].copy_(rows[self.rank])

    def gather(self, tag: int, row: Tensor) -> None:
        self.letters.send(tag, dict.fromkeys(self.peers, row[0]))
        self.incoming[tag][self.rank].copy_(row[0])

    def arrived(self, tag: int) -> Tensor:
        self.letters.arrived(tag)
        return self.incoming[tag]

    def close(self) -> None:
        self.letters.close()


class Letters:
    """Messages to some ranks and from some, over gloo: every receive is posted before any send, each by its `tag`."""

    def __init__(self, comm: Comm, incoming: Sequence[dict[int, Tensor]]) -> None:
        self.comm, self.incoming = comm, incoming
        self.sends: list[Any] = []
        comm.settled()
        self.receives = [[comm.receive_later(x, p, tag) for p, x in each.items()] for tag, each in enumerate(incoming)]

    def send(self, tag: int, outgoing: Mapping[int, Tensor]) -> None:
        """Begin to send each rank what `outgoing` has for it."""
        self.sends += [self.comm.send_later(outgoing[p], p, tag) for p in rotated(outgoing, self.comm.rank)]

    def arrived(self, tag: int) -> dict[int, Tensor]:
        """Return the messages that came under `tag`, by the rank that sent them."""
        for work in self.receives[tag]:
            work.wait()
        return self.incoming[tag]

    def close(self) -> None:
        """Wait until whatever was sent may be overwritten."""
        for work in self.sends:
            work.wait()


class Exchanges:
    """The same over NCCL, which pairs sends with receives only within one call of the whole group."""

    def __init__(self, comm: Comm, incoming: Sequence[dict[int, Tensor]], device: torch.device) -> None:
        self.comm, self.incoming, self.device = comm, incoming, device

    def send(self, tag: int, outgoing: Mapping[int, Tensor]) -> None:
        """Send each rank what `outgoing` has for it, and receive what others send under this tag."""
        self.comm.exchange_each(outgoing, self.incoming[tag], self.device)

    def arrived(self, tag: int) -> dict[int, Tensor]:
        """Return the messages that came under `tag`, by the rank that sent them."""
        return self.incoming[tag]

    def close(self) -> None:
        """Nothing is under way any more."""


def wire(comm: Comm, incoming: Sequence[Tensor]) -> Collectives | Messages:
    """Return what moves rows into the tensors `incoming` (size, bytes), each named by its place as `tag`.

    Every rank makes it with as many and as large ones; each is scattered or gathered once.
    """
    return Collectives(comm, incoming) if incoming[0].is_cuda else Messages(comm, incoming)


def letters(comm: Comm, incoming: Sequence[dict[int, Tensor]], device: torch.device) -> Letters | Exchanges:
    """Return what moves messages into the tensors `incoming`, {rank: room}, each set named by its place.

    Every rank makes it with as many, and sends once under every tag, though it be to nobody.
    """
    return Exchanges(comm, incoming, device) if device.type == "cuda" else Letters(comm, incoming)
