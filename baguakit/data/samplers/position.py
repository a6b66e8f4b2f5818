"""The position within an epoch, and how to resume from it."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np

from ...arguments import integer, real, truth
from .membership import Membership
from .plan import Batches, Costs, Indices

T = TypeVar("T")
PLACE = ("epoch", "done", "ranks", "step")  # the position in a state; its other entries decide the order


@dataclass
class Position:
    """A position within an epoch.

    Attributes:
        epoch: the number of the epoch.
        done: pairs (ranks, steps) that were trained before the number of ranks last changed.
        step: the steps trained since then.
    """

    epoch: int
    done: tuple[tuple[int, int], ...] = ()
    step: int = 0


@dataclass(frozen=True)
class Order:
    """The settings that decide the order of an epoch: equal on all ranks, and checked when resuming."""

    costs: Costs = field(repr=False)
    shuffle: bool
    seed: int
    drop_last: bool
    random_level: float

    def __post_init__(self) -> None:
        checked = {
            "shuffle": truth("shuffle", self.shuffle),
            "seed": integer("seed", self.seed, 0),
            "drop_last": truth("drop_last", self.drop_last),
            "random_level": real("random_level", self.random_level, 0, 1),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.random_level and not self.shuffle:
            raise ValueError(f"random_level={self.random_level} needs shuffle=True; set random_level=0 without it")

    def generator(self, position: Position) -> np.random.Generator:
        """Return the random generator of the part of an epoch that begins with this number of ranks."""
        return np.random.default_rng([self.seed, position.epoch, len(position.done)])

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
        self.order, self.ranks, self.epoch = order, ranks, 0
        self._now = Position(0)
        self._resumed: Position | None = None  # the start of the next pass, if it resumes one
        self._planned: tuple[tuple[Any, ...], list[Batches]] | None = None

    @abstractmethod
    def _steps(self, samples: Indices, ranks: int, position: Position) -> list[Batches]:
        """Return all steps of all ranks over `samples`, which are not trained yet."""

    @abstractmethod
    def _item(self, batch: Indices) -> T:
        """Return the item to yield for one rank's batch."""

    def _signature(self) -> dict[str, Any]:
        return self.order.signature()

    def _plan(self, position: Position) -> list[Batches]:
        key = (position.epoch, position.done)
        if self._planned is None or self._planned[0] != key:
            samples = np.arange(len(self.order.costs))
            for i, (ranks, count) in enumerate(position.done):
                steps = self._steps(samples, ranks, Position(position.epoch, position.done[:i]))[:count]
                samples = np.setdiff1d(samples, np.concatenate([samples[:0], *chain.from_iterable(steps)]))
            self._planned = key, self._steps(samples, self.ranks.size, position)
        return self._planned[1]

    def __len__(self) -> int:
        """Return the number of steps of this epoch, equal on all ranks; after a change of ranks, of the rest of it."""
        return len(self._plan(self._now))

    def __iter__(self) -> Iterator[T]:
        self._now = replace(self._resumed or Position(self.epoch))
        return self._walk(self._now)

    def _walk(self, now: Position) -> Iterator[T]:
        self._resumed = None  # only when the first item is drawn: loaders with workers make two iterators
        for step in self._plan(now)[now.step :]:
            now.step += 1
            yield self._item(step[self.ranks.rank])

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it on all ranks before each pass. A resumed epoch keeps its position.

        Args:
            epoch: the number of the epoch.
        """
        epoch = integer("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self._now, self._resumed = epoch, Position(epoch), None

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position in this epoch, equal on all ranks.

        Args:
            consumed: the number of items (samples, or batches of a batch sampler) of this pass that were trained on;
                None for the number drawn so far. Loader workers draw ahead: with them, pass it.

        Raises:
            ValueError: `consumed` is negative or more than this pass has.
        """
        step = self._now.step if consumed is None else integer("consumed", consumed, 0)
        if step > len(self):
            raise ValueError(f"consumed is {consumed} and this pass has {len(self)} items on each rank")
        done = [list(pair) for pair in self._now.done]
        return {**self._signature(), "epoch": self._now.epoch, "done": done, "ranks": self.ranks.size, "step": step}

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
        done, step = _pairs(state["done"]), integer("step in the state", state["step"], 0)
        ranks, epoch = (
            integer("ranks in the state", state["ranks"], 1),
            integer("epoch in the state", state["epoch"], 0),
        )
        if ranks != self.ranks.size and step:
            done, step = (*done, (ranks, step)), 0
        self.epoch = epoch
        self._now = self._resumed = Position(self.epoch, done, step)


def _pairs(done: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(done, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in done):
        raise TypeError(f"done in the state is a list of pairs (ranks, steps), not {done!r}")
    return tuple((integer("ranks in the state", r, 1), integer("steps in the state", k, 0)) for r, k in done)
