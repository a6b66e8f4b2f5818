"""Where an epoch stands: how far it was trained, on how many ranks, and how to go on from there."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np

from ..arguments import real, truth, whole
from .plan import Costs, Indices, Step
from .ranks import Ranks

T = TypeVar("T")
PLACE = ("epoch", "done", "ranks", "step")  # in a state, beside what decides the order


@dataclass
class Position:
    """`step` steps into what is left of `epoch` after `done`: pairs of (ranks, steps) trained before."""

    epoch: int
    done: tuple[tuple[int, int], ...] = ()
    step: int = 0


@dataclass(frozen=True)
class Order:
    """The settings that, with its number, decide the order of an epoch: equal on all ranks, checked when resuming."""

    costs: Costs = field(repr=False)
    shuffle: bool
    seed: int
    drop_last: bool
    random_level: float

    def __post_init__(self) -> None:
        checked = {
            "shuffle": truth("shuffle", self.shuffle),
            "seed": whole("seed", self.seed, 0),
            "drop_last": truth("drop_last", self.drop_last),
            "random_level": real("random_level", self.random_level, 0, 1),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.random_level and not self.shuffle:
            raise ValueError(f"random_level={self.random_level} needs shuffle=True; without it leave random_level at 0")

    def generator(self, position: Position) -> np.random.Generator:
        return np.random.default_rng([self.seed, position.epoch, len(position.done)])

    def signature(self) -> dict[str, Any]:
        return {
            "length": len(self.costs),
            "complexity": zlib.crc32(self.costs.tobytes()),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            "random_level": self.random_level,
        }


class Resumable(Generic[T]):
    """An epoch of steps cut for all ranks, of which each rank walks its own; stops and goes on anywhere.

    A step is one item (a sample, or a batch of samples) for each rank.
    """

    order: Order
    ranks: Ranks
    epoch: int

    def _begin(self, order: Order, ranks: Ranks) -> None:
        self.order, self.ranks, self.epoch = order, ranks, 0
        self._now = Position(0)
        self._resumed: Position | None = None  # where the next pass begins, if not at its beginning
        self._cut: tuple[tuple[Any, ...], list[Step]] | None = None

    @abstractmethod
    def _steps(self, samples: Indices, ranks: int, position: Position) -> list[Step]:
        """All steps of all ranks over `samples`, the ones not yet trained; pure."""

    @abstractmethod
    def _item(self, batch: Indices) -> T:
        """Return what the iterator gives for one rank's batch."""

    def _signature(self) -> dict[str, Any]:
        return self.order.signature()

    def _plan(self, position: Position) -> list[Step]:
        key = (position.epoch, position.done)
        if self._cut is None or self._cut[0] != key:
            samples = np.arange(len(self.order.costs))
            for i, (ranks, count) in enumerate(position.done):
                steps = self._steps(samples, ranks, Position(position.epoch, position.done[:i]))[:count]
                samples = np.setdiff1d(samples, np.concatenate([samples[:0], *chain.from_iterable(steps)]))
            self._cut = key, self._steps(samples, self.ranks.size, position)
        return self._cut[1]

    def __len__(self) -> int:
        """Steps of this epoch, equal on all ranks, from its beginning (or from where the number of ranks changed)."""
        return len(self._plan(self._now))

    def __iter__(self) -> Iterator[T]:
        self._now = replace(self._resumed or Position(self.epoch))
        return self._walk(self._now)

    def _walk(self, now: Position) -> Iterator[T]:
        self._resumed = None  # not before the first item is asked for: loaders with workers make two iterators
        for step in self._plan(now)[now.step :]:
            now.step += 1
            yield self._item(step[self.ranks.rank])

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it on all ranks before each. A resumed epoch keeps its place."""
        epoch = whole("epoch", epoch, 0)
        if epoch != self.epoch:
            self.epoch, self._now, self._resumed = epoch, Position(epoch), None

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Where this epoch stands, the same on every rank.

        `consumed` counts the items (samples, or batches for a batch sampler) of this pass that were trained on. Left
        out, it is what the iterator has given away, which is right without loader workers; workers draw ahead.
        """
        step = self._now.step if consumed is None else whole("consumed", consumed, 0)
        if step > len(self):
            raise ValueError(f"consumed is {consumed} and this pass has {len(self)} items on each rank")
        done = [list(pair) for pair in self._now.done]
        return {**self._signature(), "epoch": self._now.epoch, "done": done, "ranks": self.ranks.size, "step": step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken, on the same or another number of ranks: what was trained is not repeated.

        On as many ranks as before the rest of the epoch is the same, item by item; on another number it is cut anew.
        Raises ValueError where data, seed or a setting that decides the order is another, and ValueError or TypeError
        for what is no such state.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state is what state_dict() returned, not {state!r}")
        missing = [name for name in PLACE if name not in state]
        if missing:
            raise ValueError(f"state has no {', '.join(missing)}; give what state_dict() of such a sampler returned")
        for name, here in self._signature().items():
            if state.get(name) != here:
                raise ValueError(
                    f"this state was taken with {name}={state.get(name)!r} and the sampler has {here!r};"
                    " build it as it was to resume, or start the epoch anew"
                )
        done, step = _pairs(state["done"]), whole("step in the state", state["step"], 0)
        ranks, epoch = whole("ranks in the state", state["ranks"], 1), whole("epoch in the state", state["epoch"], 0)
        if ranks != self.ranks.size and step:
            done, step = (*done, (ranks, step)), 0
        self.epoch = epoch
        self._now = self._resumed = Position(self.epoch, done, step)


def _pairs(done: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(done, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in done):
        raise TypeError(f"done in the state is a list of pairs (ranks, steps), not {done!r}")
    return tuple((whole("ranks in the state", r, 1), whole("steps in the state", k, 0)) for r, k in done)
