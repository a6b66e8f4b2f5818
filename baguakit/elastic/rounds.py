"""Rounds: this process meets the others, hears when a round ends, and lets all know when it ends here."""

import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..attach.monitor import Monitor, PeerError
from ..comm import abort_all, lazy_group
from .bells import BROKEN, Bells
from .meeting import Counts, Meeting, Member, Round, Settings, confirmed, latest_round
from .pausing import Pause

ANSWER = timedelta(seconds=10)  # that the store may take to answer
CONFIRM = 5.0  # seconds that the ranks of a round have to confirm it
PROGRESS = 10.0  # seconds between two lines of a rank that waits


class Rounds:
    """The rounds of this process in a group whose ranks come and go.

    Args:
        settings: of the group.
        every: ranks are let in after a step whose number is a multiple of this.
        follow: is given the process group of each round.

    Attributes:
        round: the present one; None between two.
        why: the reason why it is over; "" while it is not.
        leaving: this rank has been asked to leave.
    """

    def __init__(self, settings: Settings, every: int, follow: Callable[[Any], None]) -> None:
        self.settings, self.every, self.follow = settings, every, follow
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self.round: Round | None = None
        self.why, self.leaving = "", False
        self._store: Any = None
        self._number = 0  # of the latest round that this process knows
        self._latest = (0, 0)  # the number of the latest round with a whole state, and the rank in it
        self._past: list[Any] = []  # process groups of rounds that are over
        self._monitors: list[Monitor] = []
        self._waiting: list[Future[Any]] = []  # collectives of the program's own

    def step(self) -> int:
        """Return the step of this rank; -1 if no rank waits for another."""
        raise NotImplementedError

    def meet(self) -> None:
        """Leave the round so far, and meet the others in the next one.

        Raises:
            TimeoutError: there has been none within the patience, or the store cannot be reached.
            Left: this process has been asked to leave meanwhile.
        """
        self.end_round()
        until = time.monotonic() + self.settings.patience
        with self._progress():
            while self.round is None:
                try:
                    self._meet(until)
                except RuntimeError as error:
                    self._store = None
                    if time.monotonic() > until:
                        where = f"{self.settings.host}:{self.settings.port}"
                        raise TimeoutError(f"the store at {where} cannot be reached: {first_line(error)}") from None
                    time.sleep(self.settings.keep_alive)
        self._begin(self.round)

    def _meet(self, until: float) -> None:
        if self._store is None:
            given: Any = dist
            host, port = self.settings.host, self.settings.port
            tcp = given.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=ANSWER)
            self._store = PrefixStore(f"baguakit/elastic/{self.settings.name}", tcp)
        me = Member(self.name, *self._latest)
        number = latest_round(self._store, self._number) + 1
        members = Meeting(self._store, self.settings, me, number).wait(until, lambda: self.leaving)
        self._number, names = number, [member.name for member in members]
        if self.name in names:
            round = Round(number, PrefixStore(str(number), self._store), names.index(self.name), members)
            if confirmed(round, CONFIRM):
                self.round = round
            else:
                Bells.broken_by(round, f"not all ranks of round {number} have come: one is lost")

    def _begin(self, round: Round) -> None:
        self.why, self._monitors, self._over = "", [], threading.Event()
        self.touch()
        self.pausing = Pause(round, self.step)
        if round.rank in round.survivors():
            self._latest = (round.number, round.rank)
        self._group = lazy_group(round.store, round.rank, round.size, timedelta(minutes=10))
        self.follow(self._group)
        self.bells = Bells(round, self._heard)
        if self.leaving:  # that was asked for meanwhile
            self.leave()
        threading.Thread(target=self._pulse, args=(round, self._over), name="baguakit pulse", daemon=True).start()

    def end_round(self, gone: bool = False) -> None:
        """End what belongs to the round; `gone`: this process does not come to the next one."""
        if self.round is not None:
            round, self.round = self.round, None
            self._over.set()
            self.bells.end()
            with contextlib.suppress(RuntimeError):  # without a store there is nobody to tell
                round.store.set(f"gone/{round.rank}" if gone else "over", self.why)
            abort_all([self._group])
            self._past.append(self._group)

    def leave(self) -> None:
        """See `Attachment.leave`."""
        self.leaving = True
        if self.round is not None:
            self.bells.pause({"every": 1, "why": f"{self.name} has left"})

    def touch(self) -> None:
        """Note that the training thread is alive."""
        self._touched = time.monotonic()

    def watch(self, monitor: Monitor) -> None:
        """End what a monitor watches when the round ends, and the round when the monitor gives up."""
        monitor.hasty, monitor.failed = True, self.broken
        self._monitors.append(monitor)
        if self.why:
            monitor.fail(self.why)

    def broken(self, why: str) -> None:
        """End the round: here, and for all."""
        if not self.why and self.round is not None:
            self.why = why
            Bells.broken_by(self.round, why)
            for monitor in list(self._monitors):
                monitor.fail(why)
            for result in list(self._waiting):
                with contextlib.suppress(InvalidStateError):  # it is there
                    result.set_exception(PeerError(why))
            abort_all([self._group])

    def during(self, work: Callable[[], Any]) -> Any:
        """Return `work()`, a collective; it is done on a thread, since gloo's waits do not end when a group is aborted.

        Raises:
            PeerError: the round is over, or ends meanwhile.
        """
        result: Future[Any] = Future()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # it belongs to this thread
        self._waiting.append(result)
        if self.why:
            result.set_exception(PeerError(self.why))

        def fly() -> None:
            with contextlib.suppress(InvalidStateError), torch.cuda.stream(stream):  # the round may have ended
                try:
                    result.set_result(work())
                except BaseException as error:
                    result.set_exception(error)

        threading.Thread(target=fly, name="baguakit collective", daemon=True).start()
        try:
            return result.result()
        finally:
            self._waiting.remove(result)

    def _heard(self, round: Round, kind: str, said: Any) -> None:
        """Hear a bell: on its thread."""
        over = self._over
        if not self.leaving:
            round.store.set(f"alive/{round.rank}", "")
        if kind != BROKEN:
            self.pausing.plan(said)
            return
        self.broken(said)
        # All wait for a process that lives, even if its training stands still.
        patience = max([monitor.timeout for monitor in self._monitors], default=CONFIRM)
        if not over.wait(max(self.settings.keep_alive, self._touched + patience - time.monotonic())):
            round.store.set(f"gone/{round.rank}", "its training stands still")

    def _pulse(self, round: Round, over: threading.Event) -> None:
        """Beat, and listen to the next rank; let the round pause when processes wait to join.

        The round ends here if the store does not answer: without it this rank cannot know that the others have gone on
        without it. A rank that is lost mostly closes connections, which tells at once; but those of lazy groups may not
        be there yet, and gloo's waits for them end with their timeout only.
        """
        counts, after = Counts(), (round.rank + 1) % round.size
        try:
            while not over.wait(self.settings.keep_alive):
                round.store.add(f"beat/{round.rank}", 1)
                if not counts.rise(round.store, f"beat/{after}", time.monotonic(), self.settings.silence):
                    name, seconds = round.members[after].name, self.settings.silence
                    self.broken(f"{name} is gone: no sign of it for {seconds:g} s")
                if round.rank == 0 and round.size < self.settings.most and self._waits(round):
                    self.bells.pause({"every": self.every, "why": "ranks have joined"})
        except RuntimeError as error:
            if not over.is_set():
                self.broken(f"{self.name} cannot reach the store: {first_line(error)}")

    def _waits(self, round: Round) -> bool:
        return bool(self._store.check([f"{round.number + 1}/came"]))

    @contextlib.contextmanager
    def _progress(self) -> Iterator[None]:
        """Write a line from time to time while the body waits."""
        over, settings = threading.Event(), self.settings

        def tell() -> None:
            while not over.wait(PROGRESS):
                where = f"{settings.host}:{settings.port}"
                print(f"baguakit: waiting for at least {settings.least} ranks at {where}", file=sys.stderr, flush=True)

        thread = threading.Thread(target=tell, name="baguakit progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
