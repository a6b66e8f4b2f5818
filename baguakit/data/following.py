"""Samplers that follow a group whose ranks come and go."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any, TypeVar

from ..arguments import integer, truth
from .resuming import Membership, Order, Position, Resumable
from .sharing import Record, Stretch, Told, regrouped, up

T = TypeVar("T")
log = logging.getLogger("baguakit")


class Followed(Resumable[T]):
    """A resumable sampler that can follow the group of an attachment."""

    def _begin(self, order: Order, ranks: Membership) -> None:
        self._record: Record | None = None  # None: it does not follow, or has joined and not heard of the others yet
        self._attachment: Any = None
        super()._begin(order, ranks)

    def follow(self, att: Any, items_per_step: int = 1, *, repeats: bool = False) -> None:
        """Divide a pass anew whenever the group changes. All ranks call it, once, after `bk.attach`.

            comm = bk.elastic.join("host:29400", least=2)
            sampler = bk.data.LoadBalancedBatchSampler(dataset, costs, budget=32768, group=comm)
            loader = DataLoader(dataset, batch_sampler=sampler, num_workers=2)
            with bk.attach(model, optimizer, algorithm, comm=comm) as att:
                sampler.follow(att)
                for epoch in range(sampler.epoch, epochs):
                    sampler.set_epoch(epoch)
                    for batch in loader:
                        with att.recoverable():
                            ...

        A rank that lives on keeps the items that it has drawn, such as those that the workers of a loader fetch ahead.
        Items that a lost rank has drawn and not trained go back to all that nobody has drawn, which is divided anew
        among the ranks that are there. A rank that joins takes over the epoch, `sampler.epoch`, and a part of the rest
        of it. Those with fewer items ahead get more, so that all end the epoch after the same number of steps.

        A step that is lost because a rank was lost has consumed its item on the others, unless the loop repeats it.
        A lost rank has trained as many items as optimizer steps were made. What it leaves is not trained in this epoch,
        and a warning says so, if another rank's iterator has ended: loaders ask for the end of an epoch ahead. Then a
        rank that joins begins with the next epoch, in which it gets as many items more as the others are behind.

        Call `set_epoch` before each pass, in ascending order. `state_dict()` needs no `consumed`, since the items
        trained are known. Items are drawn in the thread that trains, as loaders do. A rank that joins plans an epoch
        again from its beginning, with as many plans as there were changes.

        Args:
            att: the attachment, of the group that the sampler was made with.
            items_per_step: the items (samples, or batches of a batch sampler) that a rank draws for one optimizer step:
                the batch size of a loader that makes batches of samples, times the steps of accumulation.
            repeats: the loop repeats a step that was lost with the same items.

        Raises:
            ValueError: the sampler was made with another group than one of `bk.elastic.join`, or follows already, or
                has begun.
        """
        comm = self.ranks.comm
        if comm is None or comm.membership is None:
            raise ValueError("follow() needs a sampler of a group whose ranks come and go: group=bk.elastic.join(…)")
        if self._attachment is not None or (self._now.step and self._resumed is None):
            raise ValueError("call follow() once, before the first item is drawn")
        self._items, self._repeats = integer("items_per_step", items_per_step, 1), truth("repeats", repeats)
        self._attachment, self._id = att, secrets.randbits(62)
        self._pending: dict[int, Position] = {}  # where passes begin that a change has found before their beginning
        self._from = self._latest = -1  # the epoch in which this rank has joined; that of the latest pass
        place, items = self._now, self._now.step + self._now.stretch.lag(self._now.rank)
        self._sit(replace(self.ranks, rank=comm.rank, size=comm.size))  # which may have changed since
        self._resume(place.stretch, items)
        att.on_regroup(self._changed)
        if self._record is None:
            self._record = Record(0, (), att.step, self._now.stretch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; call it on all ranks before each pass. A resumed epoch keeps its position.

        Args:
            epoch: the number of the epoch.

        Raises:
            ValueError: this rank has joined a running training in a later epoch: begin with `sampler.epoch`.
        """
        if self._attachment is not None and integer("epoch", epoch, 0) < self._from:
            raise ValueError(
                f"epoch is {epoch} and this rank has joined in epoch {self._from}: begin with sampler.epoch, as in "
                "`for epoch in range(sampler.epoch, epochs)`"
            )
        super().set_epoch(epoch)

    def _first(self) -> Position:
        record = self._record
        if record is None or not record.version:
            return super()._first()
        if self.epoch in self._pending:
            return replace(self._pending[self.epoch])
        origin = (record.step, 0) if self.epoch == record.open.epoch else None
        return Position(record.stretch(self.epoch), self.ranks.rank, origin=origin)

    def _walk(self, now: Position) -> Iterator[T]:
        if self._attachment is not None:
            if now.stretch.epoch <= self._latest:
                raise ValueError(
                    f"a pass of epoch {now.stretch.epoch} has begun before: call set_epoch with a higher number before "
                    "each pass, by which the ranks that follow a group tell passes apart"
                )
            self._latest, now.base = now.stretch.epoch, (self._count(), now.step)
            now.origin = now.origin or (self._attachment.step, now.step + now.stretch.lag(now.rank))
        yield from super()._walk(now)

    def _count(self) -> int:
        """Return the bodies of `recoverable()` that have ended; if the loop repeats steps that are lost, the steps."""
        if self._repeats or self.ranks.comm is None:
            return int(self._attachment.step)
        return int(self.ranks.comm.membership.bodies)

    def _trained(self, now: Position) -> int:
        if self._attachment is None or now.base is None:
            return now.step
        count, items = now.base
        return max(0, min(now.step, items + (self._count() - count) * self._items))

    def _resume(self, stretch: Stretch, items: int) -> None:
        record = self._record
        if record is not None and record.version:
            raise ValueError("this sampler follows a group that has changed: load a state before the first change")
        super()._resume(stretch, items)
        if record is not None:
            self._record = replace(record, open=self._now.stretch)

    # A change

    def _changed(self, change: Any) -> None:
        """Agree with all ranks on what is done, and go on with the rest. Collective."""
        assert self.ranks.comm is not None
        agreement, told = self._agreement(change), None
        with contextlib.suppress(StopIteration):
            while True:
                told = self.ranks.comm.gather_objects(agreement.send(told))

    def _agreement(self, change: Any) -> Generator[Any, Any, None]:
        """Yield what this rank tells the others, and receive what all have told."""
        while True:
            told, record = (yield self._told(change.step)), self._record
            version = max(t.version for t in told)
            behind = [t for t in told if t.version < version]
            if behind:
                leader = next(rank for rank, t in enumerate(told) if t.version == version)
                record = (yield record if change.rank == leader else None)[leader]
            assert record is not None
            late = {t.id for t in behind} & set(record.ids)
            if self._id in late:
                self._enter(record, record.ids.index(self._id), joined=self._record is None)
            if not late:  # else a rank was lost during the change before, of which not all have heard to the end
                break
        joined = self._record is None or self._record.version < record.version
        self._enter(regrouped(record, told, change.step, self._items, self._shares), change.rank, joined)

    def _told(self, step: int) -> Told:
        now, record = self._now, self._record
        trained = self._trained(now)
        if record is None:
            return Told(self._id, -1)
        passes = [len(self) - trained]
        for epoch, place in self._pending.items():
            if epoch > now.stretch.epoch:
                passes.append(self._queues(place).length(place.rank))
        left = sum(up(items, self._items) for items in passes)
        origin = now.origin or (step, now.step + now.stretch.lag(now.rank))
        rank, epoch = self.ranks.rank, now.stretch.epoch
        return Told(self._id, record.version, rank, epoch, trained, now.step, left, now.over, origin)

    def _enter(self, record: Record, rank: int, joined: bool) -> None:
        """Go over to another record, in which this rank has a new number."""
        now, divided, origin, before = self._now, record.divided, (record.step, 0), self._record
        self._record = record
        old = self.ranks.rank
        self._sit(replace(self.ranks, rank=rank, size=divided.ranks))
        if joined and now.base is None:  # it has not drawn any
            self._from = self.epoch = divided.epoch
            self._now = Position(divided, rank, origin=origin)
        elif joined or now.stretch.epoch == divided.epoch:
            self._latest = max(self._latest, divided.epoch) if now.base is not None else self._latest
            self._move(now, divided, rank, origin, joined)
        elif before is not None:
            for epoch in range(now.stretch.epoch + 1, divided.epoch):
                self._pending.setdefault(epoch, Position(before.stretch(epoch), old))
        self._pending = {epoch: each for epoch, each in self._pending.items() if epoch < divided.epoch}
        if record.closing is not None:
            self._pending[divided.epoch] = Position(divided, rank, origin=origin)
        if self._now.base is None:
            self._resumed = self._now
        if record.out and rank == 0:
            epoch = divided.epoch - 1
            log.warning("%d items that a lost rank has left are not trained in epoch %d, as it ends", record.out, epoch)

    def _move(self, now: Position, stretch: Stretch, rank: int, origin: tuple[int, int], joined: bool) -> None:
        """Go on with the queue of another stretch; a rank that was left out and has joined again keeps nothing."""
        trained = self._trained(now)
        now.before, ahead = now.before + trained, now.step - trained
        now.step = 0 if joined else ahead
        now.stretch, now.rank, now.origin, now.shares = stretch, rank, origin, None
        if now.base is not None:
            now.base = (self._count(), -ahead if joined else 0)
