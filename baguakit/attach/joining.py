"""Uneven inputs: a rank that has run out of batches launches the same buckets as the others until all have run out.

A rank *at work* has batches. It announces its next event (a backward, or the start or end of a step) and then runs the
event. A rank that has *run out* announces this, reads the announcements of the ranks at work, and launches the same
buckets in the same order: zeros for gradients, and its unchanged weights.

Announcements are exchanged in a separate flight, before the flights of the event. A rank at work waits for this flight
only if its event depends on the announcements, for example if the mean is over the ranks at work only.

Rules on gradients give all ranks at work the same weights. Ranks that have run out copy these weights at the end, or
before a rule averages weights. In a mean of weights, a rank that has run out takes part with its unchanged weights.
"""

import contextlib
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..comm import Comm, row_of, weights_of
from ..flights import Turn
from ..monitor import Collective
from ..tensors import uploaded
from .broadcast import take_from
from .engine import Engine
from .setup import check_join

NOTHING = 0  # instead of a `Turn`: this rank has run out
IN_WORDS = "nothing", "a backward pass", "the start of a step", "the end of a step"  # in the order of `Turn`


class RanOut(RuntimeError):
    """A rank has run out of batches. With throw_on_early_termination, all ranks raise this error."""


class Announcement(NamedTuple):
    event: int  # the next `Turn` of the rank, or NOTHING
    step: int  # the optimizer steps that it has made
    answered: int  # whether it has launched without batches, so that its weights may be old
    node: int  # the node of the rank, and its place in it
    place: int


@contextlib.contextmanager
def joined(engine: Engine, by_all: bool, throw: bool) -> Iterator[None]:
    if engine.runtime.over:
        raise RuntimeError("this attachment is detached; call join() before it is")
    if engine.comm.membership.changes:
        raise ValueError("ranks of bk.elastic leave by att.leave() when they run out; att.join() is for other groups")
    check_join(engine.setup, by_all)
    if engine.listeners:
        raise ValueError("bk.tune.autotune tunes with all ranks at work; let it end before join()")
    engine.follow_parameters()
    call = f"join(divide_by_initial_world_size={by_all}, throw_on_early_termination={throw})"
    engine.together(call, lambda comm: None, meet=True)
    clock, joining = engine.clock, Joining(engine, by_all, throw)
    clock.joined, clock.tell = call, joining.announce
    try:
        yield
        if not engine.runtime.over and engine.backward.end_failed():  # the last batch failed
            engine.backward.drop_gradients()
        clock.tell = None
        if not engine.runtime.over:
            joining.answer()
    except RanOut:
        raise
    except BaseException as error:
        engine.abandon(error)
        raise
    finally:
        clock.joined, clock.tell, engine.idle, engine.constant = "", None, False, joining.constant


class Joining:
    """One `join()` on this rank; `by_all` and `throw` are the two arguments of `Attachment.join`."""

    def __init__(self, engine: Engine, by_all: bool, throw: bool) -> None:
        self.engine, self.by_all, self.throw, self.answered = engine, by_all, throw, False
        self.unread: deque[Collective] = deque()  # exchanges of announcements, not yet read by this rank
        self.constant = engine.constant  # the weights of all ranks

    # On a rank at work

    def announce(self, event: int) -> None:
        """Announce the next event of this rank. Wait for announcements of other ranks only if the event needs them."""
        self._exchange(event)
        backward, step = self.engine.backward, self.engine.clock.step
        again, switches = event == Turn.BACKWARD and backward.passes > 0, event == Turn.END and self._weights_part(step)
        if self.by_all and not (self.throw or again or switches):
            while self.unread and self.unread[0].flight.done():
                announced = self.engine.runtime.monitor.wait_for(self.unread.popleft())
                if announced.is_cpu:  # else the host would wait for the device
                    self._parsed(announced)
            return
        announcements, at_work = self._read_all()
        if len(at_work) == len(announcements):
            return
        again = self.by_all and again
        if again and any(runner.flown and runner.landed_on(i, backward.reached) for runner, i in backward.order):
            raise RuntimeError(
                "a second backward has added gradients to averaged ones, to which the ranks that have run out of "
                "batches would add none; use att.no_sync() for all but the last backward of a step"
            )
        if switches:
            self._take_from(at_work[0])

    def _weights_part(self, step: int) -> bool:
        """Return True if `step` averages gradients, and then weights are averaged or the next step averages none."""
        runners = self.engine.on_weights
        exchanged = any(each.exchanges(step + (each.rule.window == "between_steps")) for each in runners)
        return self._shared(step) and (exchanged or not self._shared(step + 1))

    def _shared(self, step: int) -> bool:
        return any(rule.what == "grad" and rule.acts(step) for rule in self.engine.setup.rules)

    # On a rank that has run out

    @torch.no_grad()
    def answer(self) -> None:
        """Launch the buckets of ranks at work until all have run out. Then take weights of one that trained longest."""
        self.engine.idle = True
        while True:
            self._exchange(NOTHING)
            announcements, at_work = self._read_all()
            last = max(each.step for each in announcements)
            if last != self.engine.clock.step:  # the others have made steps without announcing them
                self.engine.backward.step_ended()
                self.engine.clock.step = last
            if not at_work:
                break
            self.answered, (event, *_) = True, announcements[at_work[0]]
            if event == Turn.BACKWARD:
                self.engine.backward.shadow()
                continue
            if event == Turn.END and self._weights_part(last):
                self._take_from(at_work[0])
            self.engine.begin_step()  # this lands the flights between the steps
            if event == Turn.END:
                self.engine.end_step()
        trained = [rank for rank, each in enumerate(announcements) if each.step == last and not each.answered]
        if len(trained) < len(announcements) and self._shared(last - 1):  # gradients were averaged in the last step
            self._take_from(trained[0])

    # On all ranks

    def _exchange(self, event: int) -> None:
        engine, row = self.engine, row_of(1.0, self.engine.runtime.channels[0].comm)
        mine = [event, engine.clock.step, self.answered, *map(int, row[1:])]

        def exchanged(comm: Comm) -> Tensor:
            return comm.all_gather(uploaded(torch.tensor([mine], dtype=torch.int64), engine.setup.device))

        self.unread.append(engine.runtime.channels[0].begin("join(), what comes", exchanged))

    def _read_all(self) -> tuple[list[Announcement], list[int]]:
        """Wait for all announcements. Return a list of the latest announcements, by rank, and the ranks at work."""
        monitor = self.engine.runtime.monitor
        announced = [self._parsed(monitor.wait_for(self.unread.popleft())) for _ in range(len(self.unread))][-1]
        at_work = [rank for rank, each in enumerate(announced) if each.event != NOTHING]
        if self.throw and 0 < len(at_work) < len(announced):
            out = min(set(range(len(announced))) - set(at_work))
            raise RanOut(f"rank {out} has run out of batches, and others have not; throw_on_early_termination=True")
        if not self.by_all:  # of constant weights, those of ranks at work
            ones = [(1.0, each.node, each.place) for each in announced]
            rows = zip(announced, self.constant or ones, strict=True)
            self.engine.constant = weights_of([(w * (each.event != NOTHING), n, p) for each, (w, n, p) in rows])
        return announced, at_work

    def _parsed(self, table: Tensor) -> list[Announcement]:
        """Return the announcements of all ranks. Raise a PeerError if ranks at work announced different events."""
        announced = [Announcement(*row) for row in table.tolist()]
        known = Counter(each[:2] for each in announced if each.event != NOTHING).most_common()
        if len(known) > 1:
            (odd, at), (usual, there) = known[-1][0], known[0][0]
            rank = next(r for r, each in enumerate(announced) if each[:2] == (odd, at))
            raise self.engine.runtime.monitor.fail(
                f"rank {rank} has come to {IN_WORDS[odd]} in step {at}, and others to {IN_WORDS[usual]} in step "
                f"{there}; inside att.join() ranks that have batches make the same passes and steps"
            )
        return announced

    def _take_from(self, source: int) -> None:
        setup = self.engine.setup

        def take(comm: Comm) -> None:
            take_from(source, setup, comm)
            if setup.scaler is not None:
                setup.scaler.load_state_dict(comm.broadcast_object(setup.scaler.state_dict(), source))

        self.engine.together(f"the weights of rank {source}", take)
