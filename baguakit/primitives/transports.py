"""Rows between all ranks, and messages between some, in pieces: over NCCL in collectives, over gloo in messages.

Callers have all ranks call `comm.settled()` once before what they exchange.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import tee
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm, rotated
from ..compressors.base import Unchecked


def exchanged(
    comm: Comm,
    outgoing: Mapping[int, Iterable[Tensor]],
    incoming: Mapping[int, Sequence[Tensor]],
    device: torch.device,
    in_turns: bool = True,
    tag: int = 0,
) -> Iterator[tuple[int, int]]:
    """Send messages to other ranks, and yield (rank, index) of each that comes; the caller exhausts the iterator.

    In turn s = 1 … n − 1 rank r sends to rank r + s, and hears rank r − s; it begins a turn when all but the last
    message of the turn before is there. So a rank hears one other at a time. Messages of several meet in its link,
    which drops some: with 4 hosts at 100 Mb/s, the shards of 16 MiB take 1.07 × their line in turns, and 1.18 × at
    once.

    Args:
        comm: the group.
        outgoing: the messages to each rank. They are taken when their turn comes, so that what computes them does so
            while others are on the wire. On a GPU at most one for each rank.
        incoming: tensors for those from each rank; their senders and receivers agree on them.
        device: of the messages, for a rank that has none.
        in_turns: False for messages whose lengths differ, for which turns would last as long as their longest.
        tag: the first of as many numbers as a rank has messages. What is under way at the same time has others.
    """
    n, rank = comm.size, comm.rank
    if device.type == "cuda":  # NCCL pairs sends with receives only within one call of the whole group
        comm.exchange_each({p: x for p, each in outgoing.items() for x in each}, heads(incoming), device)
        yield from ((p, 0) for p, each in incoming.items() if each)
        return
    shifts = range(1, n)
    works = {q: [comm.receive_later(x, q, tag + i) for i, x in enumerate(incoming[q])] for q in rotated(incoming, rank)}
    sends: list[Any] = []
    due: list[tuple[int, int]] = []  # what has not been waited for of the turn before
    for turn in [[s] for s in shifts] if in_turns else [[*shifts]]:
        came, due = due, [((rank - s) % n, i) for s in turn for i in range(len(works.get((rank - s) % n, ())))]
        for q, i in came[:-2]:
            works[q][i].wait()
            yield q, i
        for q, i in came[-2:-1]:
            works[q][i].wait()
        for peer in ((rank + s) % n for s in turn):
            sends += [comm.send_later(x, peer, tag + i) for i, x in enumerate(outgoing.get(peer, ()))]
        yield from came[-2:-1]
        for q, i in came[-1:]:
            works[q][i].wait()
            yield q, i
    for q, i in due:
        works[q][i].wait()
        yield q, i
    for work in sends:
        work.wait()


def bytes_for(rows: int, values: int, codec: Unchecked, device: torch.device) -> Tensor:
    """Return memory for packed rows of so many values."""
    return torch.empty(rows, codec.row_bytes(values), dtype=torch.uint8, device=device)


def heads(messages: Mapping[int, Sequence[Tensor]]) -> dict[int, Tensor]:
    """Return the first message of each rank that has one."""
    return {p: each[0] for p, each in messages.items() if each}


def scattered(
    comm: Comm, incoming: Sequence[Tensor], packed: Callable[[int, slice], Tensor], tag: int = 0
) -> Iterator[int]:
    """Send rows of bytes to all ranks, and yield the index of each piece when its rows are there from all.

    Args:
        comm: the group.
        incoming: a tensor (size, bytes) for each piece: row q will come from rank q.
        packed: (index of a piece, ranks) to the rows for these ranks. It is called once for all of them if there is one
            piece, and else for each as it is due, this rank included.
        tag: the first of as many numbers as there are pieces.
    """
    n, rank = comm.size, comm.rank
    pieces = range(len(incoming))
    if incoming[0].is_cuda:
        for i in pieces:
            comm.all_to_all_later(incoming[i], packed(i, slice(n))).wait()
            yield i
        return
    first, last = (rank - 1) % n, (rank + 1) % n  # the ranks that are heard in the first turn and in the last
    rows = packed(0, slice(n)) if len(incoming) == 1 else None

    def row(p: int, i: int) -> Tensor:
        return packed(i, slice(p, p + 1))[0] if rows is None else rows[p]

    outgoing = {p: map(row, [p] * len(pieces), pieces) for p in range(n) if p != rank}
    coming = {q: [each[q] for each in incoming] for q in outgoing}
    for q, i in exchanged(comm, outgoing, coming, incoming[0].device, tag=tag):
        if q == first:
            incoming[i][rank] = row(rank, i)
        if q == last:
            yield i


def gathered(
    comm: Comm, incoming: Sequence[Tensor], packed: Iterable[Tensor], tag: int = 0
) -> Iterator[tuple[slice, int]]:
    """Send a row of bytes to all ranks, and yield (ranks, index of a piece) when the rows of these ranks are there.

    Several pieces pass around a ring: in step s = 0 … n − 2 rank r sends the row of rank r − s to rank r + 1, and
    receives that of rank r − s − 1 from rank r − 1. So it hears one other alone.

    Args:
        comm: the group.
        incoming: a tensor (size, bytes) for each piece: row q will come from rank q.
        packed: this rank's row (1, bytes) of each piece, taken when it is due.
        tag: the first of n times as many numbers as there are pieces.
    """
    n, rank, device = comm.size, comm.rank, incoming[0].device
    if device.type == "cuda":
        for i, row in enumerate(packed):
            comm.all_gather_later(incoming[i], row).wait()
            yield slice(n), i
        return
    own = (each[rank].copy_(row[0]) for each, row in zip(incoming, packed, strict=True))
    if len(incoming) == 1:  # few are sent to all at once, and decoded in one call
        peers = [p for p in range(n) if p != rank]
        outgoing = dict(zip(peers, tee(own, n - 1), strict=True))
        for _ in exchanged(comm, outgoing, {q: [incoming[0][q]] for q in peers}, device, tag=tag):
            pass
        yield slice(n), 0
        return
    before, after, pieces = (rank - 1) % n, (rank + 1) % n, len(incoming)
    rows = [(i, (rank - s) % n) for s in range(1, n) for i in range(pieces)]  # as they come
    works = [comm.receive_later(incoming[i][q], before, tag + k) for k, (i, q) in enumerate(rows)]
    sends = [comm.send_later(row, after, tag + k) for k, row in enumerate(own)]
    for k, (i, q) in enumerate(rows):
        works[k].wait()
        if q != after:  # whose own it is
            sends.append(comm.send_later(incoming[i][q], after, tag + pieces + k))
        yield slice(q, q + 1), i
        if k < pieces:
            yield slice(rank, rank + 1), i
    for work in sends:
        work.wait()
