"""The memory of a rank's window, which requests of peers read and change, and the edges on which this rank sends.

Nothing in this file knows of threads that send, or of the network: `Edge.take` gives the next request to send, and
`Memory.answer` is what the peer does with it. All of it is guarded by one condition, `changed`.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from .messages import ADD, DONE, FREE, GET, GONE, LOCK, PUT, UNLOCK, Format, Message, Replica, Request


class Side:
    """The state of one connection, at one of its ends."""

    def __init__(self, format: Format) -> None:
        self.puts, self.gets = Replica(format), Replica(format)


class Memory:
    """The values that a rank exposes, a buffer for each rank that it hears, and its mutex."""

    def __init__(self, format: Format, own: Tensor, sources: Iterable[int], zero: bool) -> None:
        self.changed = threading.Condition()
        self.format, self.own, self.p = format, own, 1.0  # `own` is replaced, and never written to
        first = own.to(format.wide)
        self.buffers = {peer: torch.zeros_like(first) if zero else first.clone() for peer in sources}
        self.ps = dict.fromkeys(self.buffers, 0.0 if zero else 1.0)
        self.came = dict.fromkeys(self.buffers, 0)  # calls of the peer since the last update
        self.total = dict.fromkeys(self.buffers, 0)  # puts and adds of the peer
        self.applied: dict[int, int] = {}  # the number of the latest message, by peer
        self.lost: dict[int, str] = {}  # the peers whose edges are dropped, and why
        self.closed = False
        self.back: Tensor | None = None  # sums that were not delivered, and their push-sum weight
        self.back_p = 0.0
        self.queue: deque[tuple[int, Side | None]] = deque()  # the holder of the mutex, and those that wait for it

    def answer(self, peer: int, asked: Message, side: Side, busy: Callable[[], None] = lambda: None) -> Message:
        """Do what `peer` asks, and return the answer; call `busy` each second while the peer waits for the mutex."""
        if asked.payload is not None:
            x = (side.puts if asked.kind == PUT else self.format).unpack(asked.payload)
            with self.changed:
                if peer in self.lost:
                    return Message(GONE)
                if asked.number > self.applied.get(peer, 0):  # else it has come before
                    self.applied[peer] = asked.number
                    self.total[peer] += asked.calls
                    self.take(peer, asked, x)
        elif asked.kind == GET:
            with self.changed:
                own, p = self.own, self.p
            return Message(DONE, p=p, payload=side.gets.pack(own, asked.number))
        elif asked.kind == LOCK:
            self.lock(peer, side, busy)
        elif asked.kind == UNLOCK and not self.unlock(peer, side):
            return Message(FREE)
        return Message(DONE)

    def take(self, peer: int, asked: Message, x: Tensor) -> None:
        """Put or add the values `x`, which nobody else has, and count them."""
        if asked.kind == ADD:
            self.buffers[peer].add_(x, alpha=asked.weight)
            self.ps[peer] += asked.p
        else:
            self.buffers[peer] = x if asked.weight == 1 else x * asked.weight
            self.ps[peer] = asked.p
        self.came[peer] += asked.calls
        self.changed.notify_all()

    def give_back(self, x: Tensor, weight: float, p: float) -> None:
        """Keep a sum that was not delivered; the next update or accumulate adds it to the values of this rank."""
        x = x.view(-1).to(self.format.wide) * weight
        self.back, self.back_p = x if self.back is None else self.back + x, self.back_p + p

    def lock(self, peer: int, side: Side | None, busy: Callable[[], None] = lambda: None) -> None:
        """Wait for the mutex in the order of the requests."""
        me = (peer, side)
        with self.changed:
            self.queue.append(me)
        try:
            while not self.has(me):
                busy()
        except BaseException:
            self.unlock(*me)
            raise

    def has(self, me: tuple[int, Side | None]) -> bool:
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.queue[0] == me, 1.0)
            if self.closed:
                raise ConnectionError("this window is closed")
            return self.queue[0] == me

    def unlock(self, peer: int, side: Side | None) -> bool:
        """Give the mutex, or a place in the queue for it, to the next; return False if there was none."""
        with self.changed:
            if (peer, side) not in self.queue:
                return False
            self.queue.remove((peer, side))
            self.changed.notify_all()
            return True


class Edge:
    """Requests of this rank to a peer: at most one under way, and one with values that waits."""

    def __init__(self, memory: Memory, peer: int) -> None:
        self.memory, self.peer, self.changed = memory, peer, memory.changed
        self.waiting: Request | None = None
        self.flying: Request | None = None
        self.asks: deque[Request] = deque()
        self.number = 0  # of the latest message with values
        self.left: Tensor | None = None  # what compression has lost, and the next add sends

    @property
    def pending(self) -> int:
        """The number of calls that the peer has not answered."""
        return sum(each.count for each in (self.waiting, self.flying, *self.asks) if each is not None)

    def ask(self, kind: int, weight: float = 1.0, p: float = 0.0, x: Tensor | None = None) -> Request:
        asked = Request(kind, weight, p, x)
        with self.changed:
            if self.peer in self.memory.lost:
                self.give_back(asked)
            elif x is None:
                self.asks.append(asked)
            else:
                self.waiting = asked if self.waiting is None else self.waiting.then(asked, self.memory.format.wide)
            self.changed.notify_all()
        return asked

    def give_back(self, each: Request | None) -> None:
        if each is not None and each.kind == ADD and each.x is not None:
            self.memory.give_back(each.x, each.weight, each.p)

    def take(self) -> bool:
        """Make the next request the one under way; return False if there is none."""
        if self.flying is None and self.waiting is not None:
            self.flying, self.waiting = self.waiting, None
            self.number += 1
        elif self.flying is None and self.asks:
            self.flying = self.asks.popleft()
        return self.flying is not None

    def packed(self, side: Side) -> Message | None:
        """Return the request under way, for a connection; None if the edge was dropped."""
        now = self.flying
        if now is None or now.x is None:
            return None if now is None else Message(now.kind, self.number)
        if now.kind == ADD:
            return self.memory.format.pack_sum(now, now.x, self.left, self.number)
        return Message(PUT, self.number, now.count, now.weight, now.p, side.puts.pack(now.x, self.number))

    def done(self, answer: Message, side: Side) -> None:
        """Take the answer to the request under way."""
        asked = self.flying
        x = None if answer.payload is None else side.gets.unpack(answer.payload)
        with self.changed:
            if self.peer in self.memory.lost:
                return
            self.flying = None
            if asked is not None:
                asked.answer = answer
                self.left = self.left if asked.lost is None else asked.lost
                if x is not None and self.peer in self.memory.buffers:
                    self.memory.take(self.peer, Message(PUT, 0, 1, asked.weight, asked.weight * answer.p), x)
            self.changed.notify_all()

    def drop(self, why: str) -> None:
        """Drop the edge: sums that have not been answered go back to this rank."""
        with self.changed:
            if self.peer in self.memory.lost:
                return
            self.memory.lost[self.peer] = why
            self.give_back(self.flying)
            self.give_back(self.waiting)
            if self.left is not None:
                self.memory.give_back(self.left, 1.0, 0.0)
            self.waiting = self.flying = self.left = None
            self.asks.clear()
            self.changed.notify_all()
