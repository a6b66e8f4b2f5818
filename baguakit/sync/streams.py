"""A packet as a stream of bytes: bodies behind their lengths, which are read in whatever pieces they come.

bytes      what
0 – 15     n, the length of the body, as an integer, lowest byte first
16 –       n bytes
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

LENGTH = 16  # bytes
Pieces = Iterator[Tensor]  # bytes, together a packet
Take = Callable[[int], Tensor]  # the next so many bytes, or as many as are left


def framed(body: Tensor) -> tuple[Tensor, Tensor]:
    return torch.frombuffer(bytearray(len(body).to_bytes(LENGTH, "little")), dtype=torch.uint8), body.cpu()


def next_body(take: Take) -> Tensor | None:
    """Return the next body, None at the end; raise a ValueError if it is cut off."""
    length = take(LENGTH)
    body = take(integer_of(length))
    if len(length) % LENGTH or len(body) < integer_of(length):
        raise ValueError("the packet is cut off")
    return body if len(length) else None


def taker(pieces: Iterable[Tensor]) -> Take:
    """Return a function that takes bytes from pieces of any lengths, which it asks for only when it needs them."""
    left, rest = iter(pieces), torch.empty(0, dtype=torch.uint8)

    def take(n: int) -> Tensor:
        nonlocal rest
        held = [rest]
        count = len(rest)
        while count < n and (piece := next(left, None)) is not None:
            held.append(piece)
            count += len(piece)
        whole = torch.cat(held) if len(held) > 1 else rest
        rest = whole[min(n, count) :]
        return whole[: min(n, count)]

    return take


def in_thread(pieces: Pieces) -> Pieces:
    """Yield pieces that a thread takes as they come, so that what is done with one of them does not delay the next."""
    there: queue.SimpleQueue[Tensor | BaseException | None] = queue.SimpleQueue()

    def take_all() -> None:
        try:
            deque(map(there.put, pieces), 0)
            there.put(None)
        except BaseException as error:
            there.put(error)

    threading.Thread(target=take_all, name="baguakit sync", daemon=True).start()
    while (piece := there.get()) is not None:
        if isinstance(piece, BaseException):
            try:
                raise piece
            finally:
                del piece  # else the error, and with it the group, would be held until the next garbage collection
        yield piece


def integer_of(x: Tensor) -> int:
    return int.from_bytes(bytes(x.tolist()), "little")
