"""Watch the flights of one rank. With each heartbeat, write its record and read the verdict; the judge also judges.

A heartbeat takes two requests to the store, for any number of ranks. The first writes a record. The second reads the
lease of the judge and the records of two ranks: the next rank, and a different rank with each heartbeat. One of the
waiting ranks takes the lease. It reads all records in a third request, and judges for all ranks until none waits. If
the lease is not renewed for `STALE` heartbeats, the judge has died or lost the store, and another rank takes it.

Some transports do not report that a rank is lost (NCCL reports it over sockets only), and on a GPU the host may not
wait for flights. So a rank that finds another rank silent for long takes the lease even if it waits for no flight, and
sets `silent` in the lease. Then every rank queries the flights on its device that the host does not wait for.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .judging import Judge, store_gone, store_silent
from .records import Board, Lease, Record, Waiting

STALE = 3  # heartbeats
DOUBTS = 5  # times that launches may differ without a majority of ranks that agree
HURRY = 1 / 64  # of a heartbeat: the first pause of a rank that is late, or whose flight has failed


class Watch:
    """Two threads that watch the flights of a `Monitor`, and call the monitor's `fail`."""

    def __init__(self, monitor: Any) -> None:
        self.monitor, self.beat = monitor, monitor.beat
        self.board = Board(monitor.store, monitor.rank, monitor.size)
        self.judge = Judge(monitor.rank, monitor.size, monitor.timeout, monitor.air, 1.25 * self.beat)
        self.over, self.wake = threading.Event(), threading.Event()  # `wake` is set to look now: a flight has failed
        self._beats, self._doubts = 0, 0
        self._written = Record(0, {})
        self._next_beat = 0.0  # the time of the clock from which the next record is due
        self._pause, self._hurried = self.beat, False
        self._late_at = math.inf  # the time at which the flight that is waited for is late
        self._silence = 0.0  # seconds: the longest of the ranks that were looked at last
        self._store_lost = False
        self._lease, self._renewed = Lease(), 0.0  # as it was read last, and the time of the clock at which it was new
        self._broke: float | None = None  # time since which the network has had an error
        self._asked: float | None = None  # time of the request that the store has not answered
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self.board.arrive(self._written)
        works = {"baguakit monitor": self._watch, "baguakit monitor clock": self._watch_the_store}
        self._threads = [threading.Thread(target=work, name=name, daemon=True) for name, work in works.items()]
        for thread in self._threads:
            thread.start()

    def end(self) -> bool:
        """End the threads. Return True if they have ended, False if one is blocked until the store answers."""
        self.over.set()
        self.wake.set()
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(4 * self.beat)
        return bool(threads) and not any(thread.is_alive() for thread in threads)

    def write(self, waiting: Waiting | None = None) -> None:
        monitor, (how, why) = self.monitor, self.monitor.leaving
        self._beats += 1
        self._written = Record(self._beats, monitor.air.latest(), how, why, monitor.working_on, waiting)
        self.board.write(self._written)

    def turn(self) -> None:
        """Write this rank's record if it is due, and read the lease. Judge if this rank holds it, or takes it over."""
        monitor, now = self.monitor, self.judge.look()
        waiting, hurried = self._waiting()
        changed = (waiting is None, hurried) != (self._written.waiting is None, self._hurried)
        if changed or now >= self._next_beat:
            self._next_beat = now + 0.9 * self.beat
            self._ask(self.write, waiting)
        in_need = self._in_need()
        if self._judges:
            lease = self._replace(self._mine())
        else:
            # Read the records of the next rank, and of a rank to compare launches with. A waiting rank takes the judge
            # for this, because the judge cannot compare launches that it has not made yet.
            other, judge = (monitor.rank + 1 + self._beats % (monitor.size - 1)) % monitor.size, self._lease.rank
            peers = (monitor.rank + 1) % monitor.size, judge if waiting is not None and judge >= 0 else other
            lease, records = self._ask(self.board.glance, peers)
            self._saw(lease)
            self._silence = self.judge.silence(records)
            if waiting is None or not lease.verdict:
                self._ask(self.compare, records)
        stale = lease.rank < 0 or self.judge.now - self._renewed > STALE * self.beat
        if waiting is not None and lease.verdict:
            self._give_up(lease.verdict)
        elif self._judges or ((waiting is not None or self._silent) and stale):
            self._look(lease)
        self._look_at_the_network(waiting)
        if hurried or (self._in_need() and not in_need):
            self._pause = min(2 * self._pause, self.beat / 2) if self._hurried else HURRY * self.beat
        else:
            soon = min(self.beat, self._late_at - time.time(), abs(monitor.patience - self._silence))
            self._pause = max(HURRY * self.beat, soon)
        self._hurried = hurried

    # The lease of the judge

    @property
    def _judges(self) -> bool:
        return self._lease.rank == self.monitor.rank and not self._lease.verdict

    def _mine(self, verdict: str = "") -> Lease:
        return Lease(self.monitor.rank, self._beats, verdict, self._silent)

    def _saw(self, lease: Lease) -> None:
        if lease != self._lease:
            self._lease, self._renewed = lease, self.judge.now

    def _replace(self, lease: Lease) -> Lease:
        """Replace the lease by `lease`, unless another rank has changed it; return the lease that is then valid."""
        if self._lease != lease:
            self._saw(self._ask(self.board.swap, self._lease, lease))
        return self._lease

    def _look(self, lease: Lease) -> None:
        """Take the lease if this rank does not have it, judge, and publish the verdict."""
        if lease.rank != self.monitor.rank:
            if lease.rank >= 0:  # that rank may have died: it has been silent since the lease was new
                self.judge.heard(lease.rank, lease.beats, self._renewed)
            self._replace(self._mine())
            if not self._judges:
                return
        _, records = self._ask(self.board.glance, range(self.monitor.size))
        self.judge.timeout = self.monitor.timeout
        found = self.judge.sentence(self._written, records)
        self._silence = self.judge.silence(records)
        if found is None:  # while a rank is silent, those that wait come out now
            self._replace(self._mine() if self._silent else Lease())
        elif found and not self.over.is_set():
            self._give_up(self._replace(self._mine(found)).verdict)
        elif not found:
            self._ask(self.compare, records)

    def compare(self, records: Mapping[int, Record], sure: bool = False) -> None:
        """Compare this rank's launches with those in `records`, and call `fail` if a rank is found to be at fault."""
        if self.judge.diverged(records, sure=True):
            self._doubts += 1
            _, everyone = self.board.glance(range(self.monitor.size))
            self._give_up(self.judge.diverged(everyone, sure or self._doubts > DOUBTS))

    def _give_up(self, sentence: str) -> None:
        if sentence and not self.over.is_set():
            self.monitor.fail(sentence)

    # The observations of this rank

    def _waiting(self) -> tuple[Waiting | None, bool]:
        """Return the flight that this rank waits for, if any, and whether the flight is late or has failed."""
        monitor, now = self.monitor, time.time()
        # GPU flights that the host does not wait for are queried at the timeout; earlier if one may never arrive.
        in_need = monitor.air.passed() and (self._in_need() or monitor.broken())
        passed = 2 * self.beat if in_need else monitor.timeout
        flying, failed = monitor.air.awaited(now - 2 * self.beat, now - passed)
        self._late_at = math.inf if flying is None else monitor.air.since + monitor.timeout
        if flying is None:
            return None, False
        late, patience = now > self._late_at, monitor.silence if failed or monitor.broken() else monitor.patience
        return Waiting(flying.label, flying.lane, flying.launches.number, late, patience), late or failed

    @property
    def _silent(self) -> bool:
        return bool(self._silence > self.monitor.patience)

    def _in_need(self) -> bool:
        """Return whether a flight may never arrive: a rank is silent, there is a verdict, or the store is lost."""
        return self._silent or self._lease.silent or bool(self._lease.verdict) or self._store_lost

    def _look_at_the_network(self, waiting: Waiting | None) -> None:
        """Call `fail` if the network has had an error for long and no rank at fault was found."""
        monitor, now = self.monitor, time.monotonic()
        broken = monitor.broken() if waiting is not None else ""
        self._broke = (self._broke or now) if broken else None
        if waiting is not None and self._broke is not None and now - self._broke > monitor.inquiry:
            self._give_up(f"{waiting.what} failed on rank {monitor.rank}: NCCL reports {broken}")

    # The two threads of a watch

    def _next(self, event: threading.Event, seconds: float) -> bool:
        """Wait for `event`, at most `seconds`. Return False if the thread must end."""
        if not self.over.is_set():
            event.wait(seconds)
        if self.over.is_set() or self.monitor.error is not None:
            return False
        if self.monitor.device.type == "cuda":  # a thread that asks for an event would make a context on GPU 0
            torch.cuda.set_device(self.monitor.device)
        return True

    def _watch(self) -> None:
        while self._next(self.wake, self._pause):
            self.wake.clear()
            try:
                self.turn()
            except Exception as error:
                self._store_lost = True
                if not self.over.is_set() and self._waiting()[0] is not None:
                    self.monitor.fail(store_gone(self.monitor.rank, error))
                    return
        with contextlib.suppress(Exception):  # the store died with its host: nobody is left to judge
            if self._judges:
                self._replace(Lease())

    def _watch_the_store(self) -> None:
        """Report a store that does not answer. The thread of `_watch` is then blocked in a call to the store."""
        while self._next(self.over, self.beat):
            asked, (waiting, _) = self._asked, self._waiting()
            silent = 0.0 if asked is None else time.monotonic() - asked
            if silent > self.monitor.silence and waiting is not None and waiting.late:
                self.monitor.fail(store_silent(self.monitor.rank, silent, waiting.what, self.monitor.timeout))

    def _ask(self, request: Callable[..., Any], *arguments: Any) -> Any:
        self._asked = time.monotonic()
        try:
            return request(*arguments)
        finally:
            self._asked = None
