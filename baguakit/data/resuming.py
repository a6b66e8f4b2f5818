"""The ranks and settings of a sampler, the position within an epoch, and how to resume from it."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from ..arguments import integer, real, truth
from ..comm import Comm
from .plan import Batches, Costs, Indices
from .sharing import Shares, Stretch, packed, unpacked

T = TypeVar("T")
PLACE = ("epoch", "done", "ranks", "step")  # the position in a state; its other entries decide the order


@dataclass(frozen=True)
class Membership:
    """The place of this process among the ranks of a sampler.

    Attributes:
        rank, size: the rank of this process and the number of ranks.
        comm: the group that they communicate in; None if there is no group, or one rank only.
        known: False if the caller set `rank` and `size` to other values than the process group has.
    """

    rank: int
    size: int
    comm: Comm | None = None
    known: bool = True

    @property
    def share(self) -> tuple[int, int]:
        """(rank, size) in the group that divides work; (0, 1) without a group."""
        return (0, 1) if self.comm is None else (self.rank, self.size)

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every rank that shares the work. Collective if there is a group."""
        return [value] if self.comm is None else self.comm.gather_objects(value)


def membership(num_replicas: int | None, rank: int | None, group: Any = None) -> Membership:
    """Return the given rank and number of ranks; by default those of `group`, of the default group, or one rank.

    Raises:
        TypeError: `group` is neither a `Comm` nor a process group of which this process is a member.
        ValueError: `rank` is not less than `num_replicas`.
    """
    comm = _comm(group)
    here = (0, 1) if comm is None else (comm.rank, comm.size)
    mine = here[0] if rank is None else integer("rank", rank, 0)
    size = here[1] if num_replicas is None else integer("num_replicas", num_replicas, 1)
    if mine >= size:
        raise ValueError(f"there is no rank {mine} of {size} ranks; rank runs from 0 to num_replicas - 1")
    same = (mine, size) == here
    alone = comm is None or (comm.size == 1 and comm.membership is None)
    return Membership(mine, size, comm if same and not alone else None, known=same or alone)


def _comm(group: Any) -> Comm | None:
    if isinstance(group, Comm):
        return group
    try:
        return Comm(group)
    except RuntimeError:  # torch.distributed is not initialised
        return None


@dataclass
class Position:
    """The position of one rank in a pass.

    Attributes:
        stretch: the part of the pass that has these ranks.
        rank: of this process in it.
        step: the items of its queue that are drawn.
        before: the items of this pass that this rank trained before the stretch.
        over: more items were asked for than there are.
        base: in a sampler that follows a group, a count of steps, and of the items trained by then; None before the
            pass has begun.
        origin: a number of optimizer steps, and of the items that a rank had trained by then if it was not lost.
        shares: the queues of all ranks, once they are needed.
    """

    stretch: Stretch
    rank: int
    step: int = 0
    before: int = 0
    over: bool = False
    base: tuple[int, int] | None = None
    origin: tuple[int, int] | None = None
    shares: Shares | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Order:
    """The settings that decide the order of an epoch: equal on all ranks, and checked when resuming."""

    costs: Costs = field(repr=False)
    shuffle: bool
    seed: int
    drop_last: bool
    random_level: float

    def __post_init__(self) -> None:
        for name, value in (
            ("shuffle", truth("shuffle", self.shuffle)),
            ("seed", integer("seed", self.seed, 0)),
            ("drop_last", truth("drop_last", self.drop_last)),
            ("random_level", real("random_level", self.random_level, 0, 1)),
        ):
            object.__setattr__(self, name, value)
        if self.random_level and not self.shuffle:
            raise ValueError(f"random_level={self.random_level} needs shuffle=True; set random_level=0 without it")

    def generator(self, stretch: Stretch) -> np.random.Generator:
        """Return the random generator of a stretch."""
        return np.random.default_rng([self.seed, stretch.epoch, len(stretch.done)])

    def signature(self) -> dict[str, Any]:
        """Return the settings for a state, with a checksum in place of the costs."""
        return {
            "length": len(self.costs),
            "complexity": zlib.crc32(self.costs.tobytes()),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "random_level": self.random_level,
        }


class Resumable(Generic[T]):
    """An iterator over the steps of an epoch that can stop and resume at any step.

    A step is one item (a sample, or a batch of samples) for each rank. All ranks compute all steps, and each iterates
    over its own items.
    """

    order: Order
    ranks: Membership
    epoch: int

    def _begin(self, order: Order, ranks: Membership) -> None:
        self.order, self.epoch = order, 0
        self._sit(ranks)
        self._planned: Shares | None = None  # the latest
        self._now = self._first()
        self._resumed: Position | None = None  # the start of the next pass, if it resumes one

    def _sit(self, ranks: Membership) -> None:
        """Take the place of this process among the ranks."""
        self.ranks, self.rank, self.num_replicas = ranks, ranks.rank, ranks.size

    @abstractmethod
    def _steps(self, samples: Indices, ranks: int, stretch: Stretch) -> list[Batches]:
        """Return all steps of so many ranks over `samples`, which are not trained yet."""

    @abstractmethod
    def _item(self, batch: Indices) -> T:
        """Return the item to yield for one rank's batch."""

    def _signature(self) -> dict[str, Any]:
        return self.order.signature()

    def _shares(self, stretch: Stretch) -> Shares:
        """Return the queues of all ranks. Stretches before this one are planned again, except the latest."""
        ahead: list[Stretch] = []
        while (self._planned is None or self._planned.stretch != stretch) and stretch.done:
            ahead.append(stretch)
            stretch = stretch.before()
        shares = self._planned
        if shares is None or shares.stretch != stretch:
            shares = self._shared(stretch, np.arange(len(self.order.costs)), {})
        for following in reversed(ahead):
            shares = self._shared(following, *shares.ended(following.done[-1]))
        self._planned = shares
        return shares

    def _shared(self, stretch: Stretch, samples: Indices, kept: dict[int, list[Indices]]) -> Shares:
        return Shares(stretch, samples, kept, lambda pool, ranks: self._steps(pool, ranks, stretch))

    def _queues(self, now: Position) -> Shares:
        if now.shares is None:
            now.shares = self._shares(now.stretch)
        return now.shares

    def __len__(self) -> int:
        """Return the number of steps of this epoch, equal on all ranks; after a change of ranks, of the rest of it."""
        return self._queues(self._now).length(self._now.rank)

    def __iter__(self) -> Iterator[T]:
        self._now = replace(self._resumed or self._first())
        return self._walk(self._now)

    def _first(self) -> Position:
        """Return the position at the beginning of a pass."""
        return Position(Stretch(self.epoch, self.ranks.size), self.ranks.rank)

    def _walk(self, now: Position) -> Iterator[T]:
        self._resumed = None  # only when the first item is drawn: loaders with workers make two iterators
        while now.step < self._queues(now).length(now.rank):  # the queue may change between two items
            now.step += 1
            yield self._item(self._queues(now).item(now.rank, now.step - 1))
        now.over = True

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it on all ranks before each pass. A resumed epoch keeps its position.

        Args:
            epoch: the number of the epoch.
        """
        epoch = integer("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self._resumed = epoch, None
            self._now = self._first()

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position in this epoch, equal on all ranks.

        Args:
            consumed: the number of items (samples, or batches of a batch sampler) of this pass that were trained on;
                None for the number drawn so far. Loader workers draw ahead: with them, pass it.

        Raises:
            ValueError: `consumed` is negative or more than this pass has.
        """
        now = self._now
        step = self._trained(now) if consumed is None else integer("consumed", consumed, 0) - now.before
        if not 0 <= step <= len(self):
            raise ValueError(f"consumed is {consumed} and this pass has {now.before + len(self)} items on each rank")
        stretch = now.stretch
        place = {"epoch": stretch.epoch, "done": packed(stretch.done), "ranks": stretch.ranks}
        behind = {"behind": list(stretch.behind)} if stretch.behind else {}
        return {**self._signature(), **place, "step": step + stretch.lag(now.rank), **behind}

    def _trained(self, now: Position) -> int:
        """Return the number of items of the queue that were trained, as far as this is known: those drawn."""
        return now.step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`, on the same or another number of ranks; trained samples are not repeated.

        On the same number of ranks the rest of the epoch is the same, item by item; on another number the remaining
        samples are divided again.

        Args:
            state: the result of `state_dict`.

        Raises:
            TypeError: `state` is not a state.
            ValueError: `state` is of other data, another seed or other settings.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state is the result of state_dict(), not {state!r}")
        missing = [name for name in PLACE if name not in state]
        if missing:
            raise ValueError(f"state has no {', '.join(missing)}; pass the result of state_dict() of such a sampler")
        for name, here in self._signature().items():
            if state.get(name) != here:
                raise ValueError(
                    f"this state was taken with {name}={state.get(name)!r} and the sampler has {here!r};"
                    " build the sampler with the same arguments to resume, or start the epoch again"
                )
        least = {"epoch": 0, "ranks": 1, "step": 0}
        epoch, ranks, step = (integer(f"{name} in the state", state[name], low) for name, low in least.items())
        behind = tuple(integer("behind in the state", each, 0) for each in state.get("behind", ()))
        self._resume(Stretch(epoch, ranks, unpacked(state["done"]), behind), step)

    def _resume(self, stretch: Stretch, items: int) -> None:
        """Go on in a stretch after so many items, or with other ranks in a new one."""
        if stretch.ranks != self.ranks.size:
            stretch, items = stretch.after(items, self.ranks.size), 0
        self.epoch, rank = stretch.epoch, self.ranks.rank
        self._now = self._resumed = Position(stretch, rank, max(0, items - stretch.lag(rank)))
