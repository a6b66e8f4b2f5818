"""Messages between windows: what they say, and the formats of the values in them.

Each message from a rank to a peer is answered before the next one is sent. Two messages to the same peer that wait for
the wire become one, so at most two are kept per peer, however slow the peer is:

    put x, then put y       put y                  put x, then add y       put x + y
    add x, then put y       put y                  add x, then add y       add x + y

A put in a compressor's format sends the change of a replica, which both ends have; replicas are zeros when a connection
begins. An add sends what earlier adds have lost, too (error feedback):

    put    q ← Q(x − r);   r ← r + q                       the peer's copy is r
    add    q ← Q(x + e);   e ← x + e − q                   the peer adds q
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..compressors import Compressor
from ..hashing import mixed

PUT, ADD, GET, LOCK, UNLOCK, PING = range(6)  # requests
DONE, BUSY, GONE, FREE = range(6, 10)  # answers: GONE: the edge was dropped; FREE: the rank did not hold the mutex


class Message(NamedTuple):
    """A request of a rank, or the answer to it."""

    kind: int
    number: int = 0  # of a put or an add: 1, 2, 3 …; the peer applies each number once
    calls: int = 0  # that became this message
    weight: float = 1.0  # of the values
    p: float = 0.0  # the push-sum weight, times the weights of the calls
    payload: Tensor | None = None  # bytes


@dataclass
class Request:
    """A request to send: a put or an add of values, or one without values."""

    kind: int
    weight: float = 1.0
    p: float = 0.0
    x: Tensor | None = None  # never written to
    count: int = 1  # of calls
    lost: Tensor | None = None  # the new error of the compression
    answer: Message | None = None  # once the peer has answered

    def then(self, later: "Request", wide: torch.dtype) -> "Request":
        """Return the request that has the effect of this one, and of a `later` one with values after it."""
        count = self.count + later.count
        if later.kind == PUT or self.x is None or later.x is None:
            return Request(PUT, later.weight, later.p, later.x, count)
        x = torch.add(self.x.to(wide) * self.weight, later.x.to(wide), alpha=later.weight)
        return Request(self.kind, 1.0, self.p + later.p, x, count)


class Format(NamedTuple):
    """The formats of `n` values that `rank` sends: their dtype, that of sums, and a compressor or None."""

    rank: int
    n: int
    dtype: torch.dtype
    wide: torch.dtype
    compressor: Compressor | None

    def sizes(self) -> set[int]:
        """Return the possible numbers of bytes of values."""
        exact = {self.n * self.dtype.itemsize, self.n * self.wide.itemsize}
        return {0} | (exact if self.compressor is None else {self.compressor.row_bytes(self.n)})

    def pack_sum(self, data: Request, x: Tensor, before: Tensor | None, number: int) -> Message:
        """Return the message that adds x, and set `data.lost`; `before` is what earlier messages have lost."""
        if (c := self.compressor) is None:
            return Message(ADD, number, data.count, data.weight, data.p, bytes_of(x))
        x = x.float().mul(data.weight).view(1, -1)
        x = x if before is None else x + before
        lost = torch.empty_like(x)
        packed = c.compress(x, lost, key_of(number, self.rank))
        data.lost = lost if bool(torch.isfinite(lost).all()) else torch.zeros_like(lost)
        return Message(ADD, number, data.count, 1.0, data.p, packed[0])

    def unpack(self, packed: Tensor) -> Tensor:
        """Return values in the dtype of sums; exact ones have come in it or, if they take fewer bytes, in their own."""
        if self.compressor is None:
            exact = self.wide if len(packed) == self.n * self.wide.itemsize else self.dtype
            return packed.view(exact).to(self.wide)
        return self.compressor.decompress(packed.view(1, -1), self.n).view(-1).to(self.wide)


class Replica:
    """One direction of a connection: packs or unpacks values that replace each other."""

    def __init__(self, format: Format) -> None:
        self.format = format
        self.r = torch.zeros(1, format.n if format.compressor else 0, dtype=torch.float32)

    def pack(self, x: Tensor, number: int) -> Tensor:
        if (c := self.format.compressor) is None:
            return bytes_of(x)
        packed = c.compress(x.float().view(1, -1) - self.r, key=key_of(number, self.format.rank))
        self._follow(packed)
        return packed[0]

    def unpack(self, packed: Tensor) -> Tensor:
        """Return the values in the dtype of sums."""
        if self.format.compressor is None:
            return self.format.unpack(packed)
        return self._follow(packed.view(1, -1)).view(-1).to(self.format.wide)

    def _follow(self, packed: Tensor) -> Tensor:
        """Return the replica after a change; a change that is not finite is passed on and not kept."""
        assert self.format.compressor is not None
        now = self.r + self.format.compressor.decompress(packed, self.format.n)
        if bool(torch.isfinite(now).all()):
            self.r = now
        return now


def bytes_of(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def key_of(number: int, rank: int) -> int:
    return mixed(number << 20 | rank) >> 33
