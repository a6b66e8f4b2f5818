"""Rounds: this process enters each round, notices the end of the round, and tells all ranks when it ends a round."""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..comm import abort_all, lazy_group
from ..monitor import Monitor, PeerError, first_line
from .doors import GONE, Door, Knocks
from .rendezvous import Counts, Member, Pause, Rendezvous, Round, Settings, delete_before, latest_round, tell_broken

log = logging.getLogger("baguakit")

ANSWER = timedelta(seconds=10)  # the time in which the store must answer
SLOWEST_MESSAGE = timedelta(minutes=10)  # the timeout of a part of the state for a rank that joins
LOOK = 0.1  # seconds between two looks for news of the round
STANDS = 5.0  # seconds that training may stand still when a round ends, if no attachment sets a timeout
PROGRESS = 10.0  # seconds between two lines of a rank that waits
UNANSWERED = 2.0  # seconds without an answer after which the store counts as unreachable: it is asked far more often
TOLD = 1.0  # seconds to wait for the store to accept a request of `tell`


class Left(SystemExit):
    """Raised when this rank has left the group, after `Attachment.leave` or SIGTERM. Uncaught, it exits with status 0.

    It is a SystemExit, which `except Exception` does not catch.
    """

    __module__ = "baguakit.elastic"  # tracebacks show the public name


@dataclass
class Search:
    where: str  # "host:port" of the store
    failed: str = ""  # why the store cannot be reached
    over: bool = False  # nobody waits for the search any more
    meeting: Rendezvous | None = None  # the latest one
    looked: float = field(default_factory=time.monotonic)  # when the store last answered or failed

    def silence(self) -> float:
        """Return the seconds since the store last answered or failed; 0 if they are at most `UNANSWERED`."""
        seconds = time.monotonic() - self.looked
        return seconds if seconds > UNANSWERED else 0.0

    def line(self, least: int, patience: float | None = None) -> str:
        """Return a line that says what this process waits for; with `patience`, why the search has timed out."""
        silence, within = self.silence(), "so far" if patience is None else f"within {patience:g} s"
        if why := self.failed or (silence and f"no answer for {silence:.1f} s"):
            return f"the store at {self.where} cannot be reached: {why}"
        if self.meeting is not None and (others := self.meeting.cut_off):
            left = f"{self.meeting.me.name} is left out: {within} it could not reach {others}"
            return f"{left}; check the network between them, and GLOO_SOCKET_IFNAME"
        return f"no group of at least {least} ranks has formed at {self.where} {within}"


def run(work: Callable[[], Any], name: str) -> threading.Thread:
    """Call `work()` on a new daemon thread, and return the thread."""
    thread = threading.Thread(target=work, name=f"baguakit {name}", daemon=True)
    thread.start()
    return thread


def tell(request: Callable[[], Any]) -> None:
    """Make a request to the store; ignore a failure, and wait at most `TOLD` seconds."""

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            request()

    run(ask, "tell").join(TOLD)


class Rounds:
    """The rounds of this process in a group whose ranks come and go."""

    step: Callable[[], int]  # returns the number of steps of this rank; -1 if ranks do not wait for each other

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.group: Any = None  # the process group of the latest round
        self.follow: Callable[[Any], None] = lambda group: None  # called with the process group of each round
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self.round: Round | None = None  # the present round; None between two rounds
        self.why = ""  # why the round is over; "" while it is not
        self.leaving = False  # this rank has been asked to leave
        self.door = Door()
        self.cut = ""  # a sentence about the ranks that were left out when this round began
        self._store: Any = None
        self._stuck: float | None = None  # the time since which rounds have ended without a step
        self._number = 0  # the number of the latest round that this process knows
        self._latest = (0, 0)  # the number of the latest round with a whole state, and the rank in it
        self._monitors: list[Monitor] = []
        self._waiting: list[Future[Any]] = []  # collectives that the program itself calls

    def meet(self) -> None:
        """End the current round on this rank, and wait until the next round with this rank has begun.

        Raises:
            TimeoutError: no round has begun within the patience, or the store cannot be reached.
            ValueError: this process has other settings than the group.
            Left: this process has been asked to leave meanwhile.
        """
        self.end_round()
        settings, began, lines = self.settings, time.monotonic(), 0
        search = Search(f"{settings.host}:{settings.port}")
        found: Future[Round] = Future()
        # This runs on a thread, because a call to a store that does not answer never returns.
        run(partial(self._find, found, search), "meeting")
        try:
            while not (found.done() or (self.leaving and search.silence())):
                waited = time.monotonic() - began
                if waited > settings.patience:
                    raise TimeoutError(search.line(settings.least, settings.patience))
                if waited > (lines + 1) * PROGRESS:
                    lines += 1
                    print(f"baguakit: {search.line(settings.least)}", file=sys.stderr, flush=True)
                wait([found], timeout=LOOK)
            if not found.done():
                raise Left
            self.round = round = found.result()
        except BaseException:
            self.door.close()
            raise
        finally:
            search.over = True
        self.why, self._monitors, self._over = "", [], threading.Event()
        self._touched = time.monotonic()
        self.pausing = Pause(round, self.step)
        if round.rank in round.survivors():
            self._latest = (round.number, round.rank)
        self.group = lazy_group(round.store, round.rank, round.size, SLOWEST_MESSAGE)
        self.follow(self.group)
        if self.leaving:  # that was asked for meanwhile
            self.leave()
        run(partial(self._pulse, round, self.pausing, self._over), "pulse")
        if round.rank == 0:
            run(partial(delete_before, self._store, round.number - 1), "delete")

    def _find(self, found: "Future[Round]", search: Search) -> None:
        """Set `found` to the next round with this process, or to the error that ended the search. Runs on a thread."""

        def look() -> None:
            search.looked = time.monotonic()
            if search.over:
                raise TimeoutError
            if self.leaving:
                raise Left

        try:
            while not found.done():
                try:
                    if (round := self._meet(look, search)) is not None:
                        found.set_result(round)
                except RuntimeError as error:
                    self._store, search.failed = None, first_line(error)
                    time.sleep(self.settings.keep_alive)
                    look()
        except BaseException as error:
            found.set_exception(error)

    def _meet(self, look: Callable[[], None], search: Search) -> Round | None:
        """Take part in a meeting, and return the round that it begins; None if this process is not in that round."""
        settings = self.settings
        if self._store is None:
            place = (settings.host, settings.port)
            try:  # torch would retry for a long time before it fails
                socket.create_connection(place, ANSWER.total_seconds()).close()
            except OSError as error:
                raise RuntimeError(str(error)) from error
            tcp = dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=ANSWER)  # type: ignore[attr-defined]
            self._store = PrefixStore(f"baguakit/elastic/{settings.name}", tcp)
        number = latest_round(self._store, self._number) + 1
        me = Member(self.name, *self._latest, self.door.address, settings.agreed)
        meeting = Rendezvous(self._store, settings, me, number, self.is_stuck)
        search.failed, search.meeting = "", meeting
        try:
            members = meeting.wait(look)
        except Left:
            if self._latest[0] == number - 1:
                self._store.set(f"{number - 1}/gone/{self._latest[1]}", "")
            raise
        self._number = number
        if meeting.cut:
            log.warning("%s", meeting.cut)
            self.cut, self._stuck = meeting.cut, time.monotonic()
        rank = next((rank for rank, member in enumerate(members) if member.name == self.name), None)
        return None if rank is None else Round(number, meeting.here, rank, members)

    def is_stuck(self) -> bool:
        return self._stuck is not None and time.monotonic() - self._stuck > self.settings.patience

    def end_round(self, gone: bool = False) -> None:
        """End the round on this rank: tell the others, and abort the group. With `gone`, this rank leaves for good."""
        if self.round is not None:
            round, self.round = self.round, None
            self._over.set()
            tell(lambda: round.store.set(f"gone/{round.rank}" if gone else "over", self.why))
            abort_all([self.group])
        if gone:
            self.door.close()

    def leave(self) -> None:
        self.leaving = True
        if self.round is not None:
            with contextlib.suppress(RuntimeError):  # without a store the round breaks
                self.pausing.ask(1, f"{self.name} has left")

    def watch(self, monitor: Monitor) -> None:
        """Fail the monitor's work when the round ends; end the round when the monitor fails."""
        monitor.hasty, monitor.failed = True, partial(self.broken, self.round)
        self._monitors.append(monitor)
        if self.why:
            monitor.fail(self.why)

    def broken(self, round: Round | None, why: str) -> None:
        """End `round` on all ranks, for the reason `why`. Do nothing if it is not the current round."""
        if round is None or round is not self.round or self.why:
            return
        self.why = why
        tell(lambda: tell_broken(round.store, why))
        for monitor in list(self._monitors):
            monitor.fail(why)
        for result in list(self._waiting):
            with contextlib.suppress(InvalidStateError):  # it is there
                result.set_exception(PeerError(why))
        abort_all([self.group])

    def during(self, work: Callable[[], Any], group: Any) -> Any:
        """Run the collective `work`, and return its result. If the round ends, raise a PeerError at once.

        `work` runs on a thread, because gloo's waits do not end when a group is aborted. On a GPU the host waits for
        `work` if `group` is the group of the round. The attachments use other groups, and their monitors wait.
        """
        result: Future[Any] = Future()
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None  # it belongs to this thread
        self._waiting.append(result)
        if self.why:
            result.set_exception(PeerError(self.why))

        def fly() -> None:
            with contextlib.suppress(InvalidStateError), torch.cuda.stream(stream):  # the round may have ended
                try:
                    value = work()
                    if stream is not None and group is self.group:
                        stream.synchronize()
                    result.set_result(value)
                except BaseException as error:
                    result.set_exception(error)

        run(fly, "collective")
        try:
            return result.result()
        finally:
            self._waiting.remove(result)

    def _pulse(self, round: Round, pausing: Pause, over: threading.Event) -> None:
        """Send signs of life, watch the next rank, and read in the store whether the round ends. Runs on a thread.

        Rank 0 asks for a pause when processes wait to join. If the store does not answer, the round ends on this rank,
        because the other ranks may have continued without this rank. The next rank is watched because gloo notices a
        lost rank only on open connections; a lazy group that has not connected yet would wait until its timeout.
        """
        store, settings, all_rounds = round.store, self.settings, self._store
        after, counts, knocks = round.members[(round.rank + 1) % round.size], Counts(), Knocks()
        beaten, ends = 0.0, float("inf")

        def breaks(why: str) -> None:  # an abort takes seconds, and this thread must go on beating
            run(partial(self.broken, round, why), "broken")

        try:
            while not over.wait(LOOK):
                now = time.monotonic()
                if now > ends:  # otherwise all would wait for a process whose training stands still
                    store.set(f"gone/{round.rank}", "its training stands still")
                    return
                if ends == float("inf") and store.check(["broken" if pausing.plan else "told"]):
                    if not self.leaving:
                        store.set(f"alive/{round.rank}", "")
                    if store.check(["broken"]):
                        breaks(store.get("broken").decode())
                        patience = max([monitor.timeout for monitor in self._monitors], default=STANDS)
                        ends = max(now + settings.keep_alive, self._touched + patience)
                    else:
                        pausing.heard()
                if round.size > 1 and not self.why and knocks.knock(after.door) == GONE:
                    breaks(f"{after.name} is gone: its process has ended")
                if now - beaten < settings.keep_alive:
                    continue
                beaten = now
                self.door.let_in()
                store.add(f"beat/{round.rank}", 1)
                if not counts.rise(store, f"beat/{(round.rank + 1) % round.size}", now, settings.silence):
                    breaks(f"{after.name} is gone: no sign of it for {settings.silence:g} s")
                if round.rank == 0 and round.size < settings.most and all_rounds.check([f"{round.number + 1}/came"]):
                    pausing.ask(settings.every, "ranks have joined")
        except RuntimeError as error:
            if not over.is_set():
                self.broken(round, f"{self.name} cannot reach the store: {first_line(error)}")
        finally:
            knocks.end()
