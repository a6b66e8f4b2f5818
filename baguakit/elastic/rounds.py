"""Rounds: this process meets the others, hears when a round ends, and lets all know when it ends here."""

import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.rendezvous.api import RendezvousError

from ..attach.monitor import Monitor
from ..comm import abort_all, lazy_group
from .bells import BROKEN, Bells
from .pausing import Pause
from .rendezvous import Rendezvous, Settings
from .rollcall import Member, Round, roll_call

CONFIRM = 5.0  # seconds that the ranks of a round have to confirm it


class Rounds:
    """The rounds of this process in a group whose ranks come and go.

    Args:
        settings: of the rendezvous.
        every: ranks are let in after a step whose number is a multiple of this.
        follow: is given the process group of each round.

    Attributes:
        why: the reason why the round is over; "" while it is not.
    """

    def __init__(self, settings: Settings, every: int, follow: Callable[[Any], None]) -> None:
        self.rendezvous, self.every, self.follow = Rendezvous(settings), every, follow
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self.round: Round | None = None
        self.why, self.leaving = "", False
        self._monitors: list[Monitor] = []
        self._latest = (0, 0)  # the number of the latest round with a whole state, and the rank in it

    def step(self) -> int:
        """Return the step of this rank; -1 if no rank waits for another."""
        raise NotImplementedError

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
        self.pausing = Pause(round, self.step, self._over)
        self.bells = Bells(round.store, round.rank, round.size, self._heard)
        if round.rank in round.survivors():
            self._latest = (round.number, round.rank)
        self._group = lazy_group(round.store, round.rank, round.size, timedelta(minutes=10))
        self.follow(self._group)
        if self.leaving:  # that was asked for meanwhile
            self.leave()
        threading.Thread(target=self._pulse, args=(self.bells,), name="baguakit pulse", daemon=True).start()

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

    def _pulse(self, bells: Bells) -> None:
        """Let the round pause when ranks wait to join, and end it here if the store does not answer: on a thread.

        Without the store this rank cannot know that the others have gone on without it.
        """
        over = self._over
        while not over.wait(self.rendezvous.settings.keep_alive):
            try:
                if self.rendezvous.waiting() and bells.rank == 0:
                    bells.pause({"every": self.every, "why": "ranks have joined"})
            except (RuntimeError, RendezvousError) as error:
                if not over.is_set():
                    self._broken(f"{self.name} cannot reach the store: {error}")
                return

    def leave(self) -> None:
        """See `Attachment.leave`."""
        self.leaving = True
        if self.round is not None:
            self.bells.pause({"every": 1, "why": f"{self.name} has left"})
