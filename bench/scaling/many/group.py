"""A process group of one rank among many that do not exist: it sends nothing, completes at once, and counts.

All other ranks hold what this rank holds. So a sum over n ranks is n times this rank's values, a gather repeats them,
and what a peer sends is what this rank last sent under the same tag. A store answers for the others likewise.
"""

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store

import baguakit as bk

_c10d: Any = dist


@dataclass
class Tally:
    """The traffic of one rank.

    Attributes:
        messages: to other ranks, and from them.
        collectives: by name.
        sent: bytes of messages and, of collectives, the bytes that a ring sends.
        requests: to the store, by name, without the heartbeats of the monitor, which depend on time.
        peers: the ranks of all messages.
    """

    messages: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    sent: float = 0.0
    requests: Counter[str] = field(default_factory=Counter)
    peers: set[int] = field(default_factory=set)


class Done(_c10d.Work):  # type: ignore[misc]
    """The work of a message that has arrived."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Arriving(Done):
    """The work of a receive: the message is the one that this rank sent last under the tag, or zeros."""

    def __init__(self, x: Tensor, tag: int, latest: dict[int, Tensor]) -> None:
        super().__init__()
        self.x, self.tag, self.latest = x, tag, latest

    def wait(self, timeout: timedelta | None = None) -> bool:
        mine = self.latest.get(self.tag)
        if mine is None or mine.nbytes != self.x.nbytes:
            self.x.zero_()
        else:
            self.x.view(-1).copy_(mine.reshape(-1))
        return True


class Backend:
    """The name of a backend."""

    def name(self) -> str:
        return "gloo"


class CountingGroup(_c10d.ProcessGroup):  # type: ignore[misc]
    """A process group of `size` ranks of which only this one exists. It counts what it is asked to send.

    Args:
        rank, size: of this process, and of the group.
        tally: where it counts.
        store: the store of all groups of these ranks.
    """

    _device_types = (torch.device("cpu"),)

    def __init__(self, rank: int, size: int, tally: Tally, store: "CountingStore") -> None:
        super().__init__(rank, size)
        self.tally, self.store, self.done = tally, store, Done()
        self.latest: dict[int, Tensor] = {}

    def another(self) -> "CountingGroup":
        """Return another group of the same ranks."""
        return CountingGroup(self.rank(), self.size(), self.tally, self.store)

    def _get_backend(self, device: torch.device) -> Backend:
        return Backend()

    def get_group_store(self) -> Store:
        return self.store

    def shutdown(self) -> None: ...

    def abort(self) -> None: ...

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        self.tally.messages += 1
        self.tally.sent += tensors[0].nbytes
        self.tally.peers.add(peer)
        self.latest[tag] = tensors[0]
        return self.done

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        self.tally.messages += 1
        self.tally.peers.add(peer)
        return Arriving(tensors[0], tag, self.latest)

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> Any:
        x, n = tensors[0], self.size()
        if options.reduceOp == dist.ReduceOp.SUM:
            x.mul_(n)
        return self._count("all_reduce", 2 * (n - 1) / n * x.nbytes)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Any:
        return self._count("broadcast", tensors[0].nbytes)

    def _allgather_base(self, out: Tensor, x: Tensor, options: Any) -> Any:
        out.view(self.size(), -1).copy_(x.reshape(1, -1))
        return self._count("all_gather", (self.size() - 1) * x.nbytes)

    all_gather_single = _allgather_base

    def _reduce_scatter_base(self, out: Tensor, x: Tensor, options: Any) -> Any:
        out.view(-1).copy_(x.view(self.size(), -1)[self.rank()]).mul_(self.size())
        return self._count("reduce_scatter", (self.size() - 1) * out.nbytes)

    reduce_scatter_single = _reduce_scatter_base

    def _count(self, name: str, sent: float) -> Any:
        self.tally.collectives[name] += 1
        self.tally.sent += sent
        return self.done


class CountingStore(Store):  # type: ignore[misc]
    """A store of one rank, which answers for the others and counts requests.

    A key that ends with the number of another rank holds what this rank wrote under its own number. Whatever counts
    ranks, or lists those that have come, counts and lists all.

    Args:
        rank, size: of this process, and of the group.
        tally: where it counts.
    """

    def __init__(self, rank: int, size: int, tally: Tally) -> None:
        super().__init__()
        self.rank, self.size, self.tally, self.inner = rank, size, tally, HashStore()
        self.lists: set[str] = set()

    def clone(self) -> "CountingStore":
        return self

    def _asked(self, name: str) -> None:
        if "monitor" not in threading.current_thread().name:
            self.tally.requests[name] += 1

    def _own(self, key: str) -> str | None:
        """Return the key that answers for this one; None if there is none yet."""
        if self.inner.check([key]):
            return key
        mine = re.sub(r"\d+$", str(self.rank), key)
        return mine if mine != key and self.inner.check([mine]) else None

    def _value(self, key: str) -> bytes:
        if key in self.lists:
            return "".join(f"{rank}," for rank in range(self.size)).encode()
        if (own := self._own(key)) is None:
            raise RuntimeError(f"nobody has written {key!r}")
        return bytes(self.inner.get(own))

    def set(self, key: str, value: Any) -> None:
        self._asked("set")
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._asked("get")
        return self._value(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._asked("multi_get")
        return [self._value(key) for key in keys]

    def append(self, key: str, value: Any) -> None:
        self._asked("append")
        self.lists.add(key)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._asked("compare_set")
        return bytes(self.inner.compare_set(key, expected, desired))

    def check(self, keys: Sequence[str]) -> bool:
        self._asked("check")
        return all(self._own(key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        self._asked("add")
        value = int(self.inner.add(key, amount))
        return value if amount else self.size

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._asked("wait")

    def deleteKey(self, key: str) -> bool:
        self._asked("delete_key")
        return bool(self.inner.delete_key(key))

    multiGet = multi_get


@contextlib.contextmanager
def alone(size: int, rank: int = 0) -> Iterator[tuple[bk.Comm, Tally]]:
    """Within this block: a Comm of `size` ranks of which only `rank` exists, and the tally of its traffic.

    `attach` takes rank 0, which needs no answer from another rank; the other ranks do the same in training.
    """
    tally = Tally()
    store = CountingStore(rank, size, tally)

    def own_group(like: CountingGroup, *_: Any) -> CountingGroup:
        return like.another()

    with mock.patch("baguakit.comm.own.own_group", own_group):
        yield bk.Comm(CountingGroup(rank, size, tally, store)), tally
