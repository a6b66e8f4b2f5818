"""Iterate over a sampler's epoch, resume it at any step, and divide the remaining items when ranks join or leave."""

import logging
import secrets
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import astuple, replace
from itertools import islice
from typing import Annotated, Any, Generic, TypeVar

import numpy as np

from ..arguments import Natural, Positive, Range, instance, integer, kind_of, real, truth
from .complexity import Complexity, complexities, membership
from .plan import Batches, Costs, Indices, Position, Record, Seat, Shares, Stretch, Told, assign, regrouped

T = TypeVar("T")
Count = Annotated[int, Range(-1)]
# The position in a state, and its types. The other entries of a state determine the order.
PLACE = {"epoch": Natural, "done": Sequence[tuple[Positive, Natural | Sequence[tuple[Count, Count, Count, Count]]]]}
PLACE |= {"ranks": Positive, "step": Natural}
FORM = PLACE | {"behind": Sequence[Natural]}
PLANNED = 4  # the number of stretches whose queues are cached
log = logging.getLogger("baguakit")


class Followed(Generic[T]):
    """The base class of samplers. An item is a sample or a batch. The module `plan` explains stretches and queues."""

    def _begin(self, dataset: Sized, complexity: Complexity, place: tuple[Any, Any, Any], *settings: Any) -> None:
        (rank, size, comm, known), (shuffle, seed, drop_last, level) = membership(*place), settings
        self.shuffle, self.seed = truth("shuffle", shuffle), integer("seed", seed, 0)
        self.drop_last, self.random_level = truth("drop_last", drop_last), real("random_level", level, 0, 1)
        if self.random_level and not self.shuffle:
            raise ValueError(f"random_level={self.random_level} needs shuffle=True; set random_level=0 without it")
        self._comm, self.costs, self.epoch = comm, complexities(dataset, complexity, comm, known), 0
        self._record: Record | None = None  # None if the sampler does not follow a group, or its rank has just joined
        self._attachment: Any = None
        self._places: dict[int, Position] = {}  # by epoch: where its pass begins, if a change has divided the pass
        self._from = self._latest = -1  # the epoch in which this rank joined; the epoch of the latest pass
        self._planned: dict[Stretch, Shares] = {}
        self.rank, self.num_replicas = rank, size
        self._now = self._first(0)
        self._resumed: Position | None = None  # the start of the next pass, if it resumes one

    @abstractmethod
    def _steps(self, samples: Indices, ranks: int, rng: np.random.Generator, epoch: int) -> list[Batches]:
        """Return the steps in which `ranks` ranks train `samples`, which are shuffled if the sampler shuffles."""

    def _assigned(self, costs: Costs, ranks: int, rng: np.random.Generator, epoch: int) -> Indices:
        """Return indices into `costs`, of shape (steps, ranks). The costs of each column have nearly the same sum."""
        cells = assign(np.arange(costs.size).reshape(-1, ranks), costs, rng if self.shuffle else None)
        cells = np.roll(cells, epoch, axis=1)  # each epoch moves the cells of a rank to the next rank
        return rng.permutation(cells) if self.shuffle else cells

    @abstractmethod
    def _item(self, batch: Indices) -> T:
        """Return the item to yield for one rank's batch."""

    def _signature(self) -> dict[str, Any]:
        """Return the settings that determine the order of an epoch, with a checksum instead of the costs."""
        names = ("seed", "shuffle", "drop_last", "random_level")
        costs = {"length": len(self.costs), "complexity": zlib.crc32(self.costs.tobytes())}
        return costs | {name: getattr(self, name) for name in names}

    def _shares(self, stretch: Stretch) -> Shares:
        """Return the queues of all ranks in `stretch`. If they are not cached, compute them from the stretch before."""
        if stretch not in self._planned:
            samples, kept = np.arange(len(self.costs)), dict[int, list[Indices]]()
            if stretch.done:
                *done, seats = stretch.done
                before = Stretch(stretch.epoch, tuple(seat.behind for seat in seats), tuple(done))
                samples, kept = self._shares(before).ended(seats)

            def plan(pool: Indices, ranks: int) -> list[Batches]:
                rng = np.random.default_rng([self.seed, stretch.epoch, len(stretch.done)])
                mixed = rng.permutation(pool) if self.shuffle else pool
                return self._steps(mixed, ranks, rng, stretch.epoch)

            self._planned[stretch] = Shares(stretch.behind, samples, kept, plan, np.arange(len(self.costs)))
            while len(self._planned) > PLANNED:
                del self._planned[next(iter(self._planned))]
        return self._planned[stretch]

    def __len__(self) -> int:
        """Return how many items a rank has in this epoch. After ranks join or leave, count this rank's new queue."""
        return self._shares(self._now.stretch).length(self._now.rank)

    def __iter__(self) -> Iterator[T]:
        self._now = replace(self._resumed or self._first(self.epoch))
        return self._walk(self._now)

    def _first(self, epoch: int) -> Position:
        """Return the position at which the pass of `epoch` begins."""
        undivided = Position(Stretch(epoch, (0,) * self.num_replicas), self.rank)
        return replace(self._places.get(epoch, undivided))

    def _walk(self, now: Position) -> Iterator[T]:
        if self._attachment is not None:
            if now.stretch.epoch <= self._latest:
                begun = f"a pass of epoch {now.stretch.epoch} has begun before"
                raise ValueError(f"{begun}: call set_epoch with a higher number before each pass, to tell passes apart")
            self._latest, now.base = now.stretch.epoch, now.drawn - self._count()
        self._resumed = None  # only when the first item is drawn: loaders with workers make two iterators
        while not now.over:
            stretch = now.stretch
            for item in islice(self._shares(stretch).queue(now.rank), now.drawn, None):
                now.drawn += 1
                yield self._item(item)
                if now.stretch is not stretch:  # a change has divided the remaining items again
                    break
            else:
                now.over = True

    def _count(self) -> int:
        """Return items per step × number of ended `recoverable()` blocks."""
        assert self._comm is not None
        return self._items * int(self._comm.membership.bodies)

    def _trained(self, now: Position) -> int:
        """Return the number of trained items of the queue. If the sampler follows no group, count all drawn items."""
        return now.drawn if now.base is None else max(0, min(now.drawn, now.base + self._count()))

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the pass of `epoch`. All ranks call this before each pass. A loaded epoch is continued.

        Raises a ValueError if this rank has joined the training in a later epoch. Begin with `sampler.epoch`.
        """
        epoch = integer("epoch", epoch, 0)
        if epoch < self._from:
            joined = f"epoch is {epoch} and this rank has joined in epoch {self._from}"
            raise ValueError(f"{joined}: begin with sampler.epoch, as in `for epoch in range(sampler.epoch, epochs)`")
        if epoch != self.epoch:
            self.epoch, self._now, self._resumed = epoch, self._first(epoch), None

    def state_dict(self, consumed: int | None = None) -> dict[str, Any]:
        """Return the position in this epoch, equal on all ranks.

        Args:
            consumed: the number of items (samples, or batches of a batch sampler) of this pass that were trained on;
                None: those drawn, which are too many if a loader has workers; after `follow`, those trained.

        Raises:
            ValueError: `consumed` is more than the items of this pass, or less than those trained before ranks changed.
        """
        now, stretch = self._now, self._now.stretch
        step = self._trained(now) if consumed is None else integer("consumed", consumed, 0) - now.before
        if not 0 <= step <= len(self):
            raise ValueError(f"consumed is {consumed} and this pass has {now.before + len(self)} items on each rank")
        done = [[len(seats), [list(astuple(seat)) for seat in seats]] for seats in stretch.done]
        place = {"epoch": stretch.epoch, "done": done, "ranks": len(stretch.behind), "behind": list(stretch.behind)}
        return {**self._signature(), **place, "step": step + stretch.behind[now.rank]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`, on the same or another number of ranks; trained samples are not repeated.

        On the same number of ranks, each rank continues with the same items; else the remaining samples are divided.

        Args:
            state: the result of `state_dict`.

        Raises:
            TypeError: `state`, or an entry of it, has the wrong type.
            ValueError: `state` is incomplete or of other data or settings, or the group of the sampler has changed.
        """
        instance("state", state, Mapping, "the result of state_dict()")
        missing = [name for name in PLACE if name not in state]
        if missing:
            raise ValueError(f"state has no {', '.join(missing)}; pass the result of state_dict() of such a sampler")
        for name, here in self._signature().items():
            if state.get(name) != here:
                differs = f"this state was taken with {name}={state.get(name)!r} and the sampler has {here!r}"
                raise ValueError(f"{differs}; build the sampler with the same arguments, or start the epoch again")
        taken = {x: kind_of(form).take(f"{x} in the state", state[x]) for x, form in FORM.items() if x in state}
        ranks, behind = taken["ranks"], taken.get("behind", [0] * taken["ranks"])
        # A state of 0.2.0 has one number of steps, and not a seat for each rank.
        done = [(n, [(seats, seats, -1, 0)] * n if isinstance(seats, int) else seats) for n, seats in taken["done"]]
        for n, each in [(ranks, behind), *done]:
            if len(each) != n:
                raise ValueError(f"the state was taken on {n} ranks, and has {each!r} for them")
        ended = tuple(tuple(Seat(*seat) for seat in seats) for _, seats in done)
        self._resume(Stretch(taken["epoch"], tuple(behind), ended), taken["step"])

    def _resume(self, stretch: Stretch, items: int) -> None:
        """Continue `stretch` after `items` items per rank. For a new number of ranks, divide the remaining items."""
        if self._record is not None and self._record.version:
            raise ValueError("this sampler follows a group that has changed: load a state before the first change")
        seats = [Seat(k := max(0, items - lag), k, behind=lag) for lag in stretch.behind]
        if len(seats) != self.num_replicas:
            stretch, seats = stretch.ended(seats, [0] * self.num_replicas), [Seat(0, 0)] * self.num_replicas
        self.epoch = stretch.epoch
        self._now = self._resumed = now = Position(stretch, self.rank, seats[self.rank].drawn)
        if self._attachment is not None:
            items = stretch.behind[now.rank] + now.drawn
            self._record = Record(0, (), items - self._attachment.step * self._items, stretch)
            self._since = self._count() - items  # when the record began

    # Ranks that come and go

    def follow(self, att: Any, items_per_step: int = 1) -> None:
        """Divide the pass again whenever ranks join or leave. All ranks call this once, after `bk.attach`.

            for epoch in range(sampler.epoch, epochs):
                sampler.set_epoch(epoch)

        A rank that stays keeps the items that it has drawn. All other untrained items are divided again, so that all
        ranks end the epoch after the same number of steps. If they are too few, samples are repeated. A rank that joins
        continues the epoch `sampler.epoch`, with a part of them. "Data" in docs/guide.md tells what a lost rank costs.

        Call `set_epoch` with ascending numbers before each pass. `state_dict()` needs no `consumed`. Draw items in the
        thread that trains, as loaders do.

        Args:
            att: the attachment, of the same group as the sampler.
            items_per_step: the number of items (samples, or batches of a batch sampler) that a rank draws for one
                optimizer step: the steps of accumulation, times the batch size of the loader if items are samples.

        Raises:
            ValueError: the group is not from `bk.elastic.join`, the sampler follows one already, or a pass has begun.
        """
        comm, now = self._comm, self._now
        if comm is None or not comm.membership.changes:
            raise ValueError("follow() needs a sampler of a group whose ranks come and go: group=bk.elastic.join(…)")
        if self._attachment is not None or (now.drawn and self._resumed is None):
            raise ValueError("call follow() once, before the first item is drawn")
        self._items = integer("items_per_step", items_per_step, 1)
        self._attachment, self._id = att, secrets.randbits(62)
        self._since = self._count()
        att.on_regroup(self._changed)
        if self._record is None:
            self.rank, self.num_replicas = comm.rank, comm.size  # which may have changed since
            self._resume(now.stretch, now.stretch.behind[now.rank] + now.drawn)

    def _changed(self, change: Any) -> None:
        """Divide the untrained items again. The attachment calls this on all ranks when the group changes."""
        assert self._comm is not None
        while True:
            used = self._count() - self._since
            mine = Told(self._id, self._record, self.rank, self._now, self._trained(self._now), used)
            told = self._comm.gather_objects(mine)
            record = max((t.record for t in told if t.record is not None), key=lambda record: record.version)
            late = {t.id for t in told if t.record != record} & set(record.ids)
            if self._id in late:
                self._enter(record, record.ids.index(self._id))
            if not late:  # else a rank was lost during the last change, which not all ranks completed
                break
        entered, out = regrouped(record, told, change.step, self._items, self._shares)
        self._enter(entered, change.rank)
        for epoch, items in out.items():
            log.warning("%d items that a lost rank has left are not trained in epoch %d, as it ends", items, epoch)

    def _enter(self, record: Record, rank: int) -> None:
        """Continue with a new record, in which this process has the rank `rank`."""
        now, first = self._now, record.stretch
        joined = self._record is None or self._record.version < record.version - 1
        before = () if joined else range(now.stretch.epoch, first.epoch)
        self._places = {epoch: self._first(epoch) for epoch in before}
        self._places[first.epoch] = Position(first, rank)
        self._record, self._since = record, self._count()
        self.rank, self.num_replicas = rank, len(first.behind)
        if joined and now.base is None:  # this rank has drawn no items
            self._from = self.epoch = first.epoch
            self._now = now = self._first(self.epoch)
        elif joined or now.stretch.epoch == first.epoch:
            trained = self._trained(now)
            ahead = now.drawn - trained  # not kept by a rank that was left out and has joined again
            now.stretch, now.rank = first, rank
            now.before, now.drawn = now.before + trained, 0 if joined else ahead
            now.base = None if now.base is None else (-ahead if joined else 0) - self._count()
        if now.base is None:
            self._resumed = now
        else:
            self._latest = max(self._latest, now.stretch.epoch)
