"""Rounds: this process meets the others, hears when a round ends, and lets all know when it ends here."""

import contextlib
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..attach.monitor import Monitor, PeerError
from ..attach.monitor.judging import first_line
from ..comm import abort_all, lazy_group
from .changes import Left
from .meeting import Counts, Meeting, Member, Round, Settings, delete_before, latest_round, tell_broken
from .pausing import Pause

ANSWER = timedelta(seconds=10)  # that the store may take to answer
SLOWEST_MESSAGE = timedelta(minutes=10)  # a part of the state of a rank, to one that joins
LOOK = 0.1  # seconds between two looks for news of the round
FEW = 10  # keys of old rounds that are deleted at each look
STANDS = 5.0  # seconds that training may stand still when a round ends, without an attachment that says how long
PROGRESS = 10.0  # seconds between two lines of a rank that waits


class Rounds:
    """The rounds of this process in a group whose ranks come and go.

    Args:
        settings: of the group.
        follow: is given the process group of each round.

    Attributes:
        round: the present one; None between two.
        why: the reason why it is over; "" while it is not.
        leaving: this rank has been asked to leave.
    """

    def __init__(self, settings: Settings, follow: Callable[[Any], None]) -> None:
        self.settings, self.follow = settings, follow
        self.name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:6]}"
        self.round: Round | None = None
        self.why, self.leaving = "", False
        self._store: Any = None
        self._number = 0  # of the latest round that this process knows
        self._latest = (0, 0)  # the number of the latest round with a whole state, and the rank in it
        self._past = False  # whether there are process groups of rounds that are over
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
        settings, began, lines = self.settings, time.monotonic(), 0
        where, failed = f"{settings.host}:{settings.port}", ""

        def look() -> None:
            nonlocal lines
            waited = time.monotonic() - began
            if self.leaving:
                raise Left
            if waited > settings.patience:
                if failed:
                    raise TimeoutError(f"the store at {where} cannot be reached: {failed}")
                least, most = settings.least, settings.patience
                raise TimeoutError(f"no group of at least {least} ranks has formed at {where} within {most:g} s")
            if waited > (lines + 1) * PROGRESS:
                lines += 1
                print(f"baguakit: waiting for at least {settings.least} ranks at {where}", file=sys.stderr, flush=True)

        while self.round is None:
            try:
                self._meet(look)
                failed = ""
            except RuntimeError as error:
                self._store, failed = None, first_line(error)
                look()
                time.sleep(settings.keep_alive)
        self._begin(self.round)

    def _meet(self, look: Callable[[], None]) -> None:
        if self._store is None:
            given: Any = dist
            host, port = self.settings.host, self.settings.port
            tcp = given.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=ANSWER)
            self._store = PrefixStore(f"baguakit/elastic/{self.settings.name}", tcp)
        number = latest_round(self._store, self._number) + 1
        try:
            members = Meeting(self._store, self.settings, Member(self.name, *self._latest), number).wait(look)
        except Left:
            if self._latest[0] == number - 1:
                self._store.set(f"{number - 1}/gone/{self._latest[1]}", "")
            raise
        self._number, names = number, [member.name for member in members]
        if self.name in names:
            self.round = Round(number, PrefixStore(str(number), self._store), names.index(self.name), members)

    def _begin(self, round: Round) -> None:
        self.why, self._monitors, self._over = "", [], threading.Event()
        self.touch()
        self.pausing = Pause(round, self.step)
        if round.rank in round.survivors():
            self._latest = (round.number, round.rank)
        self._group = lazy_group(round.store, round.rank, round.size, SLOWEST_MESSAGE)
        self.follow(self._group)
        if self.leaving:  # that was asked for meanwhile
            self.leave()
        words = (round, self.pausing, self._over)
        threading.Thread(target=self._pulse, args=words, name="baguakit pulse", daemon=True).start()

    def end_round(self, gone: bool = False) -> None:
        """End what belongs to the round; `gone`: this process does not come to the next one."""
        if self.round is not None:
            round, self.round = self.round, None
            self._over.set()
            with contextlib.suppress(RuntimeError):  # without a store there is nobody to tell
                round.store.set(f"gone/{round.rank}" if gone else "over", self.why)
            abort_all([self._group])
            self._past = True

    def leave(self) -> None:
        """See `Attachment.leave`."""
        self.leaving = True
        if self.round is not None:
            with contextlib.suppress(RuntimeError):  # without a store the round breaks
                self.pausing.ask(1, f"{self.name} has left")

    def touch(self) -> None:
        """Note that the training thread is alive."""
        self._touched = time.monotonic()

    def watch(self, monitor: Monitor) -> None:
        """End what a monitor watches when the round ends, and the round when the monitor gives up."""
        round = self.round
        monitor.hasty, monitor.failed = True, lambda why: self.broken(round, why)
        self._monitors.append(monitor)
        if self.why:
            monitor.fail(self.why)

    def broken(self, round: Round | None, why: str) -> None:
        """End a round, if it is the present one: here, and for all."""
        if round is None or round is not self.round or self.why:
            return
        self.why = why
        with contextlib.suppress(RuntimeError):  # the store is gone, which all ranks notice
            tell_broken(round.store, why)
        for monitor in list(self._monitors):
            monitor.fail(why)
        for result in list(self._waiting):
            with contextlib.suppress(InvalidStateError):  # it is there
                result.set_exception(PeerError(why))
        abort_all([self._group])

    def during(self, work: Callable[[], Any], group: Any) -> Any:
        """Return `work()`, a collective; it is done on a thread, since gloo's waits do not end when a group is aborted.

        On a GPU the host waits for it if `group` is that of the round: the messages of attachments have other groups,
        and a monitor that waits for them.

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
                    value = work()
                    if stream is not None and group is self._group:
                        stream.synchronize()
                    result.set_result(value)
                except BaseException as error:
                    result.set_exception(error)

        threading.Thread(target=fly, name="baguakit collective", daemon=True).start()
        try:
            return result.result()
        finally:
            self._waiting.remove(result)

    def _pulse(self, round: Round, pausing: Pause, over: threading.Event) -> None:
        """Beat, hear what the others say, and listen to the next rank; let the round pause when processes wait to join.

        The round ends here if the store does not answer: without it this rank cannot know that the others have gone on
        without it. A rank that is lost mostly closes connections, which tells at once; but those of lazy groups may not
        be there yet, and gloo's waits for them end with their timeout only.
        """
        store, settings, all_rounds = round.store, self.settings, self._store
        after, counts = (round.rank + 1) % round.size, Counts()
        beaten, ends = 0.0, float("inf")

        def breaks(why: str) -> None:  # on a thread, since an abort takes seconds, and this one beats meanwhile
            threading.Thread(target=self.broken, args=(round, why), name="baguakit broken", daemon=True).start()

        try:
            old = delete_before(all_rounds, round.number - 1) if round.rank == 0 else iter(())
            while not over.wait(LOOK):
                now = time.monotonic()
                for _ in islice(old, FEW):  # the beats go on meanwhile
                    pass
                if now > ends:  # all wait for a process that lives, even if its training stands still
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
                if now - beaten < settings.keep_alive:
                    continue
                beaten = now
                store.add(f"beat/{round.rank}", 1)
                if not counts.rise(store, f"beat/{after}", now, settings.silence):
                    breaks(f"{round.members[after].name} is gone: no sign of it for {settings.silence:g} s")
                if round.rank == 0 and round.size < settings.most and all_rounds.check([f"{round.number + 1}/came"]):
                    pausing.ask(settings.every, "ranks have joined")
        except RuntimeError as error:
            if not over.is_set():
                self.broken(round, f"{self.name} cannot reach the store: {first_line(error)}")
