"""A packet as a stream of bytes: bodies behind their lengths (16 bytes, the lowest first), in pieces of any lengths."""

import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor

LENGTH = 16  # bytes
Pieces = Iterator[Tensor]  # bytes, together a packet
Take = Callable[[int], Tensor]  # the next so many bytes, or as many as are left
Packets = AbstractContextManager[list[tuple[str, Take]]]  # where each comes from, and its bytes


def framed(body: Tensor) -> tuple[Tensor, Tensor]:
    return bytes_in(len(body).to_bytes(LENGTH, "little")), body.cpu()


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
        held, count = [rest], len(rest)
        while count < n and (piece := next(left, None)) is not None:
            held.append(piece)
            count += len(piece)
        whole = torch.cat(held) if len(held) > 1 else rest
        rest = whole[min(n, count) :]
        return whole[: min(n, count)]

    return take


def in_thread(pieces: Pieces) -> Pieces:
    """Yield pieces that a thread takes as they come, so that what is done with one of them does not delay the next."""
    there: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
    with ThreadPoolExecutor(1, "baguakit sync") as pool:
        taken = pool.submit(deque, map(there.put, pieces), 0)
        taken.add_done_callback(lambda _: there.put(None))
        while (piece := there.get()) is not None:
            yield piece
        try:
            taken.result()
        finally:
            del taken  # else an error, and with it the group, would be held until the next garbage collection


def bytes_in(x: bytes) -> Tensor:
    return torch.frombuffer(bytearray(x), dtype=torch.uint8)


def integer_of(x: Tensor) -> int:
    return int.from_bytes(bytes(x.tolist()), "little")
