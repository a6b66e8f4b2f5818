"""Packets between the ranks of a `Comm`: rank 0 publishes, and each other rank passes on what comes to the next.

The bytes go along the chain 0, 1, 2 … in messages, so that all links work at once, and while rank 0 packs the rest:
with n ranks, S bytes and messages of M bytes, the last rank has them after (S + (n − 2) M) / B.

Rank 0 does not know how many bytes there will be. So each message begins with the lengths of up to two later ones, as
int64, 0 for none: who has received it waits for these. The first has nothing else. Rank 0 is further ahead with each,
up to MOST, so that the time on the way limits no rate before MOST messages are on their way.
"""

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..comm import Comm, device_of
from .streams import Pieces, Take, in_thread, taker

PIECE, HEAD = 1 << 18, 16  # bytes
MOST = 64  # messages


class Group:
    """The versions that rank 0 of a Comm publishes; `most` is the number of bytes of changes that it keeps."""

    def __init__(self, comm: Comm, most: float, publishes: bool) -> None:
        self.most, self.publishes = most, publishes
        self.log: dict[int, Tensor] = {}  # changes by the version that they lead to
        self.move(comm)

    def move(self, comm: Comm) -> None:
        if self.publishes != (comm.rank == 0):
            raise ValueError(f"to is a Comm on its rank 0, source a Comm on its other ranks; this is rank {comm.rank}")
        self._comm: Comm | None = comm

    @property
    def comm(self) -> Comm:
        if self._comm is None:
            raise RuntimeError("an exchange has failed here; form a new group, and call regroup(comm)")
        return self._comm

    def begin(self) -> int:
        return -1

    def add(self, packet: Pieces, run: str, version: int, whole: bool, copy: Callable[[], Pieces]) -> None:
        """Send what leads to this version from the oldest that a rank has; the whole copy if that is not kept."""
        deque(self._passed_on(self._cut(self._wanted(packet, int(run, 16), version, whole, copy))), 0)

    def _wanted(self, packet: Pieces, run: int, version: int, whole: bool, copy: Callable[[], Pieces]) -> Pieces:
        told = [torch.empty(2, dtype=torch.int64, device=device_of(self.comm.group)) for _ in range(1, self.comm.size)]
        for work in [self.comm.receive_later(x, rank) for rank, x in enumerate(told, 1)]:
            work.wait()
        oldest = min((v if r == run else -1 for v, r in map(Tensor.tolist, told)), default=version)
        missed = range(oldest + 1, version)
        if not whole:
            packet = self._kept(packet, version)
            if oldest >= 0 and self.log.keys() >= set(missed):
                packet = itertools.chain(map(self.log.__getitem__, missed), packet)
            else:
                deque(packet, 0)  # only then is the copy that of this version
                packet = copy()
        yield from packet

    def _kept(self, packet: Pieces, version: int) -> Pieces:
        kept = []
        for part in packet:
            kept.append(part)
            yield part
        self.log[version] = torch.cat(kept)
        while sum(map(len, self.log.values())) > self.most:
            del self.log[min(self.log)]

    @contextlib.contextmanager
    def packets_after(self, version: int, run: str) -> Iterator[list[tuple[str, Take]]]:
        """Give the packets that come from rank 0, and pass them on: all of them, whatever is wrong with them."""
        here = torch.tensor([version, int(run or "0", 16)], device=device_of(self.comm.group))
        pieces = in_thread(self._passed_on(self._received(here)))
        try:
            yield [("from rank 0", taker(pieces))]
        finally:
            deque(pieces, 0)

    def _cut(self, packet: Pieces) -> Pieces:
        """Yield the messages of rank 0."""
        take, ahead = taker(packet), deque([torch.empty(0, dtype=torch.uint8)])
        for many in itertools.chain((PIECE, 0), itertools.repeat(PIECE)):  # the second leaves before more is packed
            if not ahead:
                return
            piece, later = ahead.popleft(), [take(many), take(many if len(ahead) < MOST else 0)]
            ahead.extend(filter(len, later))
            lengths = torch.tensor(list(map(len, later)), dtype=torch.int64)
            yield torch.cat([lengths.view(torch.uint8), piece]).to(device_of(self.comm.group))

    def _received(self, here: Tensor) -> Pieces:
        """Tell rank 0 which version is here, and yield the messages that come from the rank before."""
        self.comm.send_later(here, 0).wait()
        tags = itertools.count()

        def expected(length: int) -> tuple[Tensor, Any]:
            message = torch.empty(HEAD + length, dtype=torch.uint8, device=here.device)
            return message, self.comm.receive_later(message, self.comm.rank - 1, next(tags))

        coming = deque([expected(0)])
        while coming:
            message, work = coming.popleft()
            work.wait()
            coming.extend(expected(length) for length in message[:HEAD].view(torch.int64).tolist() if length)
            yield message

    def _passed_on(self, messages: Pieces) -> Pieces:
        """Yield the bytes of messages when they are on their way to the next rank; at the end all of them are there."""
        going: deque[Any] = deque()
        try:
            for tag, message in enumerate(messages):
                if self.comm.rank < self.comm.size - 1:
                    going.append(self.comm.send_later(message, self.comm.rank + 1, tag))
                if len(going) > MOST:
                    going.popleft().wait()
                yield message[HEAD:].cpu()
            for each in going:
                each.wait()
        except BaseException:
            self._comm = None  # so that nothing here holds the group: others hear of it as its connections close
            raise
