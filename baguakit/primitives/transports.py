"""Exchange rows or messages between ranks, in pieces: by collectives over NCCL, by messages over gloo.

All ranks call `comm.agree_on_shares()` once before they exchange something with these functions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat, tee, zip_longest
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm
from ..compressors import Compressor

# Rows of this many bytes or more go around a ring, so that the link between two machines, or two cities, carries each
# row once, and not once for each rank behind it. Of 13 M values in 8 bits, the mean of eight hosts in two cities took
# 4.8 s so, and 5.5 s when all rows went to all ranks at once (100 Mb/s and 50 ms there and back between the cities).
RING = 1 << 20


def exchanged(
    comm: Comm,
    outgoing: Mapping[int, Iterable[Tensor]],
    incoming: Mapping[int, Sequence[Tensor]],
    device: torch.device,
    tag: int = 0,
) -> Iterator[tuple[int, int]]:
    """Send messages to other ranks, and yield (rank, index) of each received message. Exhaust this iterator.

    Piece 0 goes to ranks r + 1, r + 2 … from rank r, then piece 1, and so on, and nothing waits for an answer: with
    eight hosts, each 25 ms from the others, turns in which a rank hears one peer took 1.6 times as long.

    `outgoing` has the messages to each rank; an iterator may compute them when they are sent. Over NCCL it has at most
    one message to each rank. `incoming` has the tensors to receive the messages from each rank. All tensors are on
    `device`. Message i has the tag `tag` + i. Exchanges at the same time need different tags.
    """
    n, rank = comm.size, comm.rank
    if comm._by_nccl(device):  # NCCL pairs sends with receives only within one call of the whole group
        first = {p: each[0] for p, each in incoming.items() if each}
        comm.exchange_each({p: x for p, each in outgoing.items() for x in each}, first, device)
        yield from ((p, 0) for p in first)
        return
    works = {(q, i): comm.receive_later(x, q, tag + i) for q, each in incoming.items() for i, x in enumerate(each)}
    distances = sorted({(p - rank) % n for p in outgoing} | {(rank - q) % n for q in incoming})
    sends: list[Any] = []
    for i, messages in enumerate(zip_longest(*(outgoing.get((rank + s) % n, ()) for s in distances))):
        pairs = zip(distances, messages, strict=True)
        sends += [comm.send_later(x, (rank + s) % n, tag + i) for s, x in pairs if x is not None]
        comm.met()
    if works:
        comm.met()
    for q, i in sorted(works, key=lambda at: (at[1], (rank - at[0]) % n)):
        works[q, i].wait()
        yield q, i
    for work in sends:
        work.wait()


def bytes_for(rows: int, values: int, codec: Compressor, device: torch.device) -> Tensor:
    """Return an uninitialised byte tensor for `rows` packed rows of `values` values."""
    return torch.empty(rows, codec._unchecked_row_bytes(values), dtype=torch.uint8, device=device)


def scattered(comm: Comm, incoming: Sequence[Tensor], packed: Callable[[int, slice], Tensor]) -> Iterator[int]:
    """Send rows of bytes to all ranks, and yield the index of each piece when its rows from all ranks have arrived.

    `incoming` has a tensor (size, bytes) for each piece; row q will come from rank q. `packed(piece, ranks)` returns
    the rows for these ranks. `packed` is called once if there is one piece, else once for each rank and piece.
    """
    n, rank = comm.size, comm.rank
    pieces = range(len(incoming))
    if comm._by_nccl(incoming[0].device):
        for i in pieces:
            comm.all_to_all_later(incoming[i], packed(i, slice(n))).wait()
            yield i
        return
    last = (rank + 1) % n  # the rank that is heard last
    rows = packed(0, slice(n)) if len(incoming) == 1 else None

    def row(p: int, i: int) -> Tensor:
        return packed(i, slice(p, p + 1))[0] if rows is None else rows[p]

    outgoing = {p: map(row, repeat(p), pieces) for p in range(n) if p != rank}
    coming = {q: column for q, column in enumerate(zip(*map(torch.unbind, incoming), strict=True)) if q != rank}
    for q, i in exchanged(comm, outgoing, coming, incoming[0].device):
        if q == last and i == 0:  # its own, while the others of that rank are on the wire
            for piece in pieces:
                incoming[piece][rank] = row(rank, piece)
        if q == last:
            yield i


def shared(comm: Comm, rows: Tensor, row: Tensor, tag: int = 0) -> None:
    """Send `row` (1, bytes) to all ranks at once, and fill `rows` (size, bytes); row q comes from rank q."""
    if comm._by_nccl(rows.device):
        comm.all_gather_later(rows, row).wait()
        return
    n, rank = comm.size, comm.rank
    works = [comm.receive_later(rows[rank - s], (rank - s) % n, tag) for s in range(1, n)]
    works += [comm.send_later(row[0], (rank + s) % n, tag) for s in range(1, n)]
    rows[rank] = row[0]
    comm.met()
    for work in works:
        work.wait()


def gathered(
    comm: Comm, incoming: Sequence[Tensor], packed: Iterable[Tensor], tag: int = 0
) -> Iterator[tuple[slice, int]]:
    """Send a row of bytes to all ranks, and yield (ranks, i) when piece i of the rows of these ranks has arrived.

    Rows with several pieces and at least `RING` bytes go around a ring, unless there are flows: in step s = 0 … n − 2,
    rank r of n sends row r − s to rank r + 1, and receives row r − s − 1 from rank r − 1. Other rows go to all at once.

    `incoming` is as in `scattered`. `packed` yields this rank's row (1, bytes) of each piece when it is needed. The
    exchange uses n tags for each piece, from `tag` on.
    """
    n, rank = comm.size, comm.rank
    if comm._by_nccl(incoming[0].device) or len(incoming) == 1:  # one piece is decoded in one call
        for i, row in enumerate(packed):
            shared(comm, incoming[i], row, tag)
            yield slice(n), i
        return
    own = (each[rank].copy_(row[0]) for each, row in zip(incoming, packed, strict=True))
    if comm.flows == 1 and sum(each[rank].nbytes for each in incoming) >= RING:
        heard = _around(comm, incoming, own, tag)
    else:
        columns = enumerate(zip(*map(torch.unbind, incoming), strict=True))
        coming = {q: column for q, column in columns if q != rank}
        heard = exchanged(comm, dict(zip(coming, tee(own, n - 1), strict=True)), coming, incoming[0].device, tag)
    for q, i in heard:
        yield slice(q, q + 1), i
        if q == (rank - 1) % n:  # which is heard first
            yield slice(rank, rank + 1), i


def _around(comm: Comm, incoming: Sequence[Tensor], own: Iterator[Tensor], tag: int) -> Iterator[tuple[int, int]]:
    """Gather rows around a ring; yield (q, i) when piece i of rank q's row has arrived."""
    n, rank, pieces = comm.size, comm.rank, len(incoming)
    before, after = (rank - 1) % n, (rank + 1) % n
    rows = [(i, (rank - s) % n) for s in range(1, n) for i in range(pieces)]  # as they come
    works = [comm.receive_later(incoming[i][q], before, tag + k) for k, (i, q) in enumerate(rows)]
    sends = [comm.send_later(row, after, tag + k) for k, row in enumerate(own)]
    comm.met()
    for k, (i, q) in enumerate(rows):
        works[k].wait()
        if q != after:  # whose own it is
            sends.append(comm.send_later(incoming[i][q], after, tag + pieces + k))
        yield q, i
    for work in sends:
        work.wait()
