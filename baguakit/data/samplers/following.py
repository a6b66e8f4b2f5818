"""A change of the group in the midst of a pass: a pure function of what the ranks tell each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .sharing import Seat, Shares, Stretch


@dataclass(frozen=True)
class Record:
    """The state of a sampler that all ranks share from one change of the group to the next.

    Attributes:
        version: the number of changes before.
        ids: of the ranks; () before the first change.
        step: the optimizer steps that were made when it began.
        open: the stretch that the next change ends, unless a later pass has begun by then.
        out: items that a lost rank has left and nobody trains.
        closing: the end of the pass before the open one, where too few samples are left for ranks to end together.
    """

    version: int
    ids: tuple[int, ...]
    step: int
    open: Stretch
    out: int = 0
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
    if any(t.over for t in here):
        ends = [up(_left(t, epoch, record, shares), items_per_step) for t in told]
        out = sum(max(0, shares(stretch).length(rank) - seats[rank].trained) for rank in lost)
        return Record(record.version + 1, ids, step, Stretch(epoch + 1, len(told), (), behind(ends)), out)
    lags = [up(_before(t, epoch, record), items_per_step) for t in told]
    began = any(seat.drawn for seat in seats) or (stretch.done and any(seat.to >= 0 for seat in stretch.done[-1]))
    divided = Stretch(epoch, len(told), (*stretch.done, tuple(seats)) if began else stretch.done, behind(lags))
    ends = [up(divided.lag(rank) + shares(divided).length(rank), items_per_step) for rank in range(len(told))]
    out = sum(max(0, stretch.lag(rank) - items) for rank in lost)
    if len(set(ends)) == 1:
        return Record(record.version + 1, ids, step, divided, out)
    after = Stretch(epoch + 1, len(told), (), behind(ends))
    return Record(record.version + 1, ids, step, after, out, divided)


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
