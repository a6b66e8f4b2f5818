"""The division of one pass among ranks that may change: pure functions of a few numbers, equal on all ranks.

A pass is divided anew whenever the ranks change. In each *stretch* between two changes a rank goes through its queue:

    queue_r  =  the items that it has drawn in stretches before and not trained  +  its items of the plan

When the stretch ends, rank r has trained the first of them and drawn some more. If it lives on, it keeps what it has
drawn; all that nobody has trained or keeps is planned again. The plan begins with steps for those ranks alone that have
less before them, so that all end the pass together, as far as the samples go:

    behind_r + len(queue_r)  =  the same for all r
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import numpy as np

from ..arguments import integer
from .plan import Batches, Indices

Steps = Sequence[Batches]
Plan = Callable[[Indices, int], Steps]  # (samples, ranks) -> the steps of all ranks


@dataclass(frozen=True)
class Seat:
    """The place of one rank in a stretch that has ended.

    Attributes:
        trained, drawn: items of its queue; of a rank that is lost, `drawn` is `trained`.
        to: its rank in the next stretch; -1 if it has none.
        behind: as in the stretch.
    """

    trained: int
    drawn: int
    to: int = -1
    behind: int = 0


Done = tuple[tuple[Seat, ...], ...]


@dataclass(frozen=True)
class Stretch:
    """A part of a pass in which the ranks stay the same. Its numbers decide who has which items.

    Attributes:
        epoch: the number of the epoch.
        ranks: the number of ranks.
        done: the seats of all ranks in each stretch of this pass before.
        behind: for each rank, the steps that it makes in the pass before, counted from the beginning of this stretch;
            () if no rank makes any.
    """

    epoch: int
    ranks: int
    done: Done = ()
    behind: tuple[int, ...] = ()

    def lag(self, rank: int) -> int:
        """Return the steps that a rank makes before its queue."""
        return self.behind[rank] if self.behind else 0

    def before(self) -> Stretch:
        """Return the stretch before this one, in the same pass."""
        seats = self.done[-1]
        behind = tuple(seat.behind for seat in seats)
        return Stretch(self.epoch, len(seats), self.done[:-1], behind if any(behind) else ())

    def after(self, items: int, ranks: int) -> Stretch:
        """Return the stretch of other ranks, none of which keeps what it has drawn, after so many items of each."""
        if not items and not (self.done and any(seat.to >= 0 for seat in self.done[-1])):
            return Stretch(self.epoch, ranks, self.done)
        trained = [max(0, items - self.lag(rank)) for rank in range(self.ranks)]
        seats = tuple(Seat(k, k, behind=self.lag(rank)) for rank, k in enumerate(trained))
        return Stretch(self.epoch, ranks, (*self.done, seats))


class Shares:
    """The queues of all ranks in a stretch.

    Args:
        stretch: of which they are.
        samples: that nobody has trained in this pass.
        kept: items that a rank has drawn before and not trained.
        plan: returns the steps of all ranks over some samples.
    """

    def __init__(self, stretch: Stretch, samples: Indices, kept: Mapping[int, list[Indices]], plan: Plan) -> None:
        self.stretch, self.samples = stretch, samples
        # Each part has the column of each rank that takes part, and the steps.
        self.parts: list[tuple[dict[int, int], Steps]] = [
            ({rank: 0}, [[item] for item in items]) for rank, items in kept.items()
        ]
        ahead = [stretch.lag(rank) + len(kept.get(rank, ())) for rank in range(stretch.ranks)]
        taken = chain.from_iterable(kept.values())
        levels = sorted(set(ahead))
        for low, high in zip(levels, [*levels[1:], None], strict=True):
            few = [rank for rank in range(stretch.ranks) if ahead[rank] <= low]
            samples = without(samples, taken)
            self.steps = plan(samples, len(few)) if high is None else first_steps(samples, len(few), high - low, plan)
            self.parts.append(({rank: column for column, rank in enumerate(few)}, self.steps))
            taken = chain.from_iterable(self.steps)

    def length(self, rank: int) -> int:
        """Return the number of items in the queue of a rank."""
        return sum(len(steps) for columns, steps in self.parts if rank in columns)

    def item(self, rank: int, i: int) -> Indices:
        """Return item i of the queue of a rank: the samples of one step."""
        for columns, steps in self.parts:
            if rank in columns:
                if i < len(steps):
                    return steps[i][columns[rank]]
                i -= len(steps)
        raise IndexError(f"the queue of rank {rank} ends {i} items before")

    def queue(self, rank: int) -> Iterator[Indices]:
        """Return the queue of a rank, made as it is read."""
        return (steps[i][columns[rank]] for columns, steps in self.parts if rank in columns for i in range(len(steps)))

    def ended(self, seats: Sequence[Seat]) -> tuple[Indices, dict[int, list[Indices]]]:
        """Return the samples that nobody has trained when this stretch has ended so, and the items kept by rank."""
        taken = [list(islice(self.queue(rank), seat.drawn)) for rank, seat in enumerate(seats)]
        trained = (items[: seat.trained] for items, seat in zip(taken, seats, strict=True))
        pairs = zip(taken, seats, strict=True)
        kept = {seat.to: items[seat.trained :] for items, seat in pairs if seat.to >= 0}
        return without(self.samples, chain.from_iterable(trained)), kept


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


def without(samples: Indices, items: Iterable[Indices]) -> Indices:
    """Return the samples that are in none of the items, in ascending order."""
    return np.setdiff1d(samples, np.concatenate([samples[:0], *items]))


def first_steps(pool: Indices, ranks: int, count: int, plan: Plan) -> Steps:
    """Return so many steps of a plan of the pool, or as many as there are; samples are repeated only at its end."""
    steps = plan(pool[: len(pool) // ranks * ranks], ranks)
    return (steps if len(steps) >= count else plan(pool, ranks))[:count]


# A change of the group


@dataclass(frozen=True)
class Record:
    """The state of a sampler that all ranks share from one change of the group to the next.

    Attributes:
        version: the number of changes before.
        ids: of the ranks; () before the first change.
        step: the optimizer steps that were made when it began.
        open: the stretch that the next change ends, unless a later pass has begun by then.
        out: by epoch, the number of items that a lost rank has left and nobody trains, of which rank 0 warns.
        closing: the end of the pass before the open one, where too few samples are left for ranks to end together.
    """

    version: int
    ids: tuple[int, ...]
    step: int
    open: Stretch
    out: Mapping[int, int] = field(default_factory=dict)
    closing: Stretch | None = None

    def stretch(self, epoch: int) -> Stretch:
        """Return the stretch in which an epoch begins or goes on."""
        return self.open if epoch == self.open.epoch else Stretch(epoch, self.open.ranks)

    @property
    def divided(self) -> Stretch:
        """The stretch that was divided anew when the record began."""
        return self.closing or self.open


@dataclass(frozen=True)
class Told:
    """The numbers that a rank tells the others at a change.

    Attributes:
        id: of the rank, equal in all groups.
        version: of its record; -1 if it has none.
        rank: in that record.
        epoch: of the pass in which it is.
        trained, drawn: items of its queue there.
        left: items of whole steps that it trains before it comes to a pass that was not divided yet.
        over: more items were asked for than there are: its iterator has ended.
        origin: a number of optimizer steps, and of the items of a queue that were trained by then.
    """

    id: int
    version: int
    rank: int = 0
    epoch: int = 0
    trained: int = 0
    drawn: int = 0
    left: int = 0
    over: bool = False
    origin: tuple[int, int] = (0, 0)


def regrouped(
    record: Record, told: Sequence[Told], step: int, items_per_step: int, shares: Callable[[Stretch], Shares]
) -> Record:
    """Return the record of the new group.

    Items are left out where a rank is lost and the iterator of another has ended already: it cannot take any.

    Args:
        record: of the group before.
        told: by each rank of the new group; one whose version is not that of the record has joined.
        step: the optimizer steps made.
        items_per_step: items that a rank trains in one of them.
        shares: returns the queues of a stretch.
    """
    known = {t.rank: (new, t) for new, t in enumerate(told) if t.version == record.version}
    epoch = max([*(t.epoch for _, t in known.values()), *([record.open.epoch] if record.version else [])])
    stretch, lost = record.stretch(epoch), [rank for rank in range(record.open.ranks) if rank not in known]
    here = [t for _, t in known.values() if t.epoch == epoch]
    since, items = min(here, key=lambda t: t.rank).origin if here else (record.step, 0)
    items += (step - since) * items_per_step  # that a lost rank has trained since
    seats = [Seat(k := max(0, items - (lag := stretch.lag(rank))), k, -1, lag) for rank in range(stretch.ranks)]
    for rank, (new, t) in known.items():
        mine = (t.trained, t.drawn) if t.epoch == epoch else (0, 0)
        seats[rank] = Seat(*mine, new, stretch.lag(rank))
    ids = tuple(t.id for t in told)
    # If rank 0 was lost, perhaps before it has heard what it had to warn of, the next one warns.
    out = Counter(record.out if record.ids and record.ids[0] not in ids else {})
    out[epoch - 1] += sum(max(0, stretch.lag(rank) - items) for rank in lost)
    if any(t.over for t in here):
        ends = [up(_left(t, epoch, record, shares), items_per_step) for t in told]
        out[epoch] += sum(max(0, shares(stretch).length(rank) - seats[rank].trained) for rank in lost)
        return Record(record.version + 1, ids, step, Stretch(epoch + 1, len(told), (), behind(ends)), +out)
    lags = [up(_before(t, epoch, record), items_per_step) for t in told]
    began = any(seat.drawn for seat in seats) or (stretch.done and any(seat.to >= 0 for seat in stretch.done[-1]))
    divided = Stretch(epoch, len(told), (*stretch.done, tuple(seats)) if began else stretch.done, behind(lags))
    ends = [up(divided.lag(rank) + shares(divided).length(rank), items_per_step) for rank in range(len(told))]
    if len(set(ends)) == 1:
        return Record(record.version + 1, ids, step, divided, +out)
    after = Stretch(epoch + 1, len(told), (), behind(ends))
    return Record(record.version + 1, ids, step, after, +out, divided)


def behind(steps: Sequence[int]) -> tuple[int, ...]:
    """Return the `behind` of a stretch."""
    return tuple(steps) if any(steps) else ()


def up(items: int, items_per_step: int) -> int:
    """Return the items of whole steps, the last of which may have fewer."""
    return -(-items // items_per_step) * items_per_step


def _before(t: Told, epoch: int, record: Record) -> int:
    """Return the items that a rank trains before it comes to the pass of this epoch.

    One that was left out of the group and has joined again trains what it has drawn: a loader does not give it back.
    """
    if t.version != record.version:
        return t.drawn - t.trained
    return t.left if t.epoch < epoch else 0


def _left(t: Told, epoch: int, record: Record, shares: Callable[[Stretch], Shares]) -> int:
    """Return the items that a rank trains until the pass of this epoch is over."""
    if t.version != record.version or t.epoch < epoch:
        rest = shares(record.stretch(epoch)).length(t.rank) if t.version == record.version else 0
        return _before(t, epoch, record) + rest
    return t.left


# In a state


def packed(done: Done) -> list[list[Any]]:
    """Return stretches for a state: [ranks, steps], or [ranks, [trained, drawn, to, behind] of each rank]."""
    return [[len(seats), _steps(seats)] for seats in done]


def _steps(seats: tuple[Seat, ...]) -> Any:
    plain = Seat(seats[0].trained, seats[0].trained)
    if all(seat == plain for seat in seats):
        return plain.trained
    return [[seat.trained, seat.drawn, seat.to, seat.behind] for seat in seats]


def unpacked(done: Any) -> Done:
    """Return the stretches in a state.

    Raises:
        TypeError, ValueError: they are none.
    """
    if not isinstance(done, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in done):
        raise TypeError(f"done in the state is a list of pairs (ranks, steps), not {done!r}")
    return tuple(_seats(integer("ranks in the state", ranks, 1), steps) for ranks, steps in done)


def _seats(ranks: int, steps: Any) -> tuple[Seat, ...]:
    if not isinstance(steps, (list, tuple)):
        k = integer("steps in the state", steps, 0)
        return (Seat(k, k),) * ranks
    if len(steps) != ranks or not all(isinstance(each, (list, tuple)) and len(each) == 4 for each in steps):
        raise ValueError(f"steps in the state are four numbers for each of {ranks} ranks, not {steps!r}")
    return tuple(Seat(*(integer("steps in the state", x, -1) for x in each)) for each in steps)
