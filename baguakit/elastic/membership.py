"""The membership of this process: it meets the others, hears when a round ends, and carries its attachments on."""

import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..attach.engine import Engine
from ..attach.monitor import Monitor, PeerError
from ..attach.runtime.agreement import Disagreement
from ..comm import abort_all, lazy_group
from .bells import BROKEN, Bells
from .carrying import Carrying, Kept, abandon, kept_after_loss, kept_at_pause
from .changes import Change, Left
from .pausing import Pause
from .rendezvous import Rendezvous, Settings
from .rollcall import Member, Round, roll_call

log = logging.getLogger("baguakit")

CONFIRM = 5.0  # seconds that the ranks of a round have to confirm it
FRUITLESS = 3  # regroups without a step between them, and with nobody lost, after which the error is raised


class Membership:
    """The membership of this process in a group whose ranks come and go.

    Args:
        settings: of the rendezvous.
        every: ranks are let in after a step whose number is a multiple of this.
        follow: is given the process group of each round.
    """

    def __init__(self, settings: Settings, every: int, follow: Callable[[Any], None]) -> None:
        self.rendezvous, self.every, self.follow = Rendezvous(settings), every, follow
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self.round: Round | None = None
        self.leaving = False
        self.bodies = 0  # of `recoverable` that have ended
        self._monitors: list[Monitor] = []
        self._latest = (0, 0)  # the number of the latest round with a whole state, and the rank in it
        self._engines: list[Engine] = []
        self._kept: dict[Engine, Kept] = {}  # those that are not at work
        self._began: dict[Engine, int] = {}  # at work: the step at which the round began
        self._callbacks: list[Callable[[Change], None]] = []
        self._joined: Change | None = None  # a running training, which callbacks are told when they are registered
        self._fruitless = 0

    # The round

    def meet(self) -> None:
        """Leave the round so far, and meet the others in the next one."""
        self.end_round()
        least = self.rendezvous.settings.least
        while self.round is None:
            info, me = self.rendezvous.next(), Member(self.name, *self._latest)
            try:
                self.round = roll_call(info.store, info.rank, info.world_size, least, me, CONFIRM)
            except RuntimeError:  # the store is gone; the rendezvous says so if it does not come back
                self.rendezvous.drop()
        round, self.why, self._monitors = self.round, "", []
        self.touch()
        self._over = threading.Event()
        self.pausing = Pause(round, self._step, self._over)
        self.bells = Bells(round.store, round.rank, round.size, self._heard)
        if round.rank in round.survivors():
            self._latest = (round.number, round.rank)
        self._group = lazy_group(round.store, round.rank, round.size, timedelta(minutes=10))
        self.follow(self._group)
        if self.leaving:  # that was asked for meanwhile
            self.leave()
        if round.rank == 0:
            threading.Thread(target=self._invite, args=(self.bells,), name="baguakit invite", daemon=True).start()

    def end_round(self) -> None:
        """End what belongs to the round."""
        if self.round is not None:
            self.round = None
            self._over.set()
            self.bells.end()
            abort_all([self._group])

    def part(self) -> None:
        """Leave the group for good, or until the next attachment."""
        self.end_round()
        self.rendezvous.drop()

    def touch(self) -> None:
        """Note that the training thread is alive."""
        self._touched = time.monotonic()

    def watch(self, monitor: Monitor) -> None:
        """End what a monitor watches when the round ends, and the round when the monitor gives up."""
        monitor.hasty, monitor.failed = True, self._broken
        self._monitors.append(monitor)
        if self.why:
            monitor.fail(self.why)

    def _heard(self, kind: str, said: Any) -> None:
        """Hear a bell: on its thread."""
        if kind != BROKEN:
            self.pausing.plan(said)
            return
        over = self._over
        self._broken(said)
        # A process whose training stands still lives on in the rendezvous, and all would wait for it to come.
        patience = max([monitor.timeout for monitor in self._monitors], default=CONFIRM)
        soon = self.rendezvous.settings.keep_alive
        if not over.wait(max(soon, self._touched + patience - time.monotonic())):
            self.rendezvous.drop()

    def _broken(self, why: str) -> None:
        """End the round: here, and for all."""
        if not self.why:
            self.why = why
            self.bells.broken(why)
            for monitor in list(self._monitors):
                monitor.fail(why)
            abort_all([self._group])

    def _invite(self, bells: Bells) -> None:
        """Let the round pause as soon as ranks wait to join: on rank 0, on a thread."""
        over = self._over
        while not over.wait(self.rendezvous.settings.keep_alive):
            with contextlib.suppress(Exception):  # the store is gone: the round will break by that
                if self.rendezvous.waiting():
                    bells.pause({"every": self.every, "why": "ranks have joined"})
                    return

    def _step(self) -> int:
        """Return the step of this rank; -1 if no rank waits for another."""
        engines = list(self._began)
        if any(engine.free_runners for engine in engines):
            return -1
        return max([engine.clock.step for engine in engines], default=0)

    # The attachments

    def start(self, engine: Engine) -> None:
        """Start an attachment in this round, or in a later one if this one breaks. Collective."""
        self._engines.append(engine)
        try:
            if self.round is None:
                self.meet()
            try:
                change = self._start(engine)
            except PeerError as error:
                self.regroup(error)
            else:
                self._whole()
                self._joined = change
        except BaseException:
            self._engines.remove(engine)
            if not self._engines:
                self.part()
            raise

    def _start(self, engine: Engine) -> Change | None:
        """Start an attachment in this round; return the change if a rank of it has trained before."""
        round = self.round
        assert round is not None
        survivors = round.survivors()
        carrying = Carrying(engine, self._kept.get(engine) if round.rank in survivors else None, survivors)
        try:
            engine.start(carrying.fill, carrying.load)
        except BaseException:
            if carrying.kept is not None:
                self._kept[engine] = carrying.kept
            raise
        self._kept.pop(engine, None)
        self._began[engine] = engine.clock.step
        if not survivors:
            return None
        before = tuple(member.rank if rank in survivors else None for rank, member in enumerate(round.members))
        return Change(round.rank, round.size, before, (), carrying.steps, engine.clock.step, 0.0, "")

    def _whole(self) -> None:
        """Note that this rank has a whole state."""
        if self.round is not None:
            self._latest = (self.round.number, self.round.rank)

    def ended(self, engine: Engine) -> None:
        """Note that an attachment is detached; with the last one this process leaves."""
        for each in (self._kept, self._began):
            each.pop(engine, None)
        self._engines.remove(engine)
        if not self._engines:
            self.part()

    def on_regroup(self, callback: Callable[[Change], None]) -> None:
        """See `Attachment.on_regroup`."""
        self._callbacks.append(callback)
        if self._joined is not None:
            callback(self._joined)

    # A step

    @contextlib.contextmanager
    def recoverable(self) -> Iterator[None]:
        """See `Attachment.recoverable`."""
        self.touch()
        self._joined = None
        step = self._step()
        buffers = [(x, x.clone()) for engine in self._engines for x in engine.setup.model.buffers()]
        try:
            yield
        except RuntimeError as error:
            if not self._is_loss(error):
                raise
            self.bodies += 1
            with torch.no_grad():
                for x, before in buffers if self._step() == step else ():
                    x.copy_(before)
            self.regroup(error)
        else:
            self._fruitless, self.bodies = 0, self.bodies + 1
            if self.why:
                self.regroup(PeerError(self.why))
            elif self.pausing.due(self._step()):
                self.regroup(None)
        self.touch()

    def leave(self) -> None:
        """See `Attachment.leave`."""
        self.leaving = True
        if self.round is not None:
            self.bells.pause({"every": 1, "why": f"{self.name} has left"})

    def _is_loss(self, error: RuntimeError) -> bool:
        """Return whether a rank that is lost may have caused an error: one of an attachment, or of the network."""
        return isinstance(error, (PeerError, dist.DistError)) or bool(self.why) or "gloo" in str(error)

    def regroup(self, error: BaseException | None) -> None:
        """Meet again, and go on from the last whole step; `error` is None after a pause on which all had agreed."""
        began, old = time.monotonic(), self.round
        why = self.pausing.why if error is None else str(error)
        error = self._keep(error)
        if self.leaving:
            self.part()
            raise Left(0)
        while True:
            self.meet()
            try:
                changes = [self._start(engine) for engine in self._engines]
                break
            except (PeerError, Disagreement) as again:
                self._check_again(again)
                self._keep(again)
        self._whole()
        self._report(changes[0], old, why, time.monotonic() - began, error)

    def _keep(self, error: BaseException | None) -> BaseException | None:
        """Take attachments out of the round, and keep their states; return the error that has ended it, if any."""
        for engine, step in list(self._began.items()):
            if error is None:
                try:
                    self._kept[engine] = kept_at_pause(engine, step)
                except PeerError as late:
                    error = late
            if error is not None:
                self._broken(str(error))
                self._kept[engine] = kept_after_loss(engine, error, step)
            del self._began[engine]
        for engine in self._engines:
            if hasattr(engine, "runtime"):
                abandon(engine, error)
        return error

    def _check_again(self, error: BaseException) -> None:
        """Raise a disagreement on a rank that has joined: it is this rank that differs."""
        round = self.round
        if isinstance(error, Disagreement) and (round is None or round.rank not in round.survivors()):
            raise error

    def _report(self, change: Change | None, old: Round | None, why: str, seconds: float, error: Any) -> None:
        """Tell the callbacks, and the log on rank 0."""
        round = self.round
        if change is None or round is None:
            return
        here = {member.name for member in round.members}
        gone = tuple(member.name for member in old.members if member.name not in here) if old is not None else ()
        change = Change(change.rank, change.ranks, change.before, gone, change.steps, change.step, seconds, why)
        self._fruitless = self._fruitless + 1 if error is not None and not gone else 0
        if self._fruitless >= FRUITLESS:
            raise PeerError(f"{FRUITLESS} regroups, in which no rank was lost, have not helped: {why}") from error
        if round.rank == 0:
            lost = f"; lost: {', '.join(gone)}" if gone else ""
            log.warning("%d ranks go on from step %d after %.1f s%s; %s", change.ranks, change.step, seconds, lost, why)
        for callback in self._callbacks:
            callback(change)
