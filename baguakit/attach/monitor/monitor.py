"""The monitor: it names the rank at fault when a flight does not arrive.

Each rank writes a record to the store: a heartbeat, its latest launch on each lane, and whether and why it left. When a
flight is late or fails, the monitor reads the records of the other ranks and names the one at fault. With every
heartbeat a rank compares its launches with those of one other rank, so that ranks which have parted do not train on.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from .collective import Collective
from .errors import PeerError, again, from_network
from .judging import Judge, Waiting, first_line, store_gone, store_silent
from .records import GAVE_UP, Board, History, LaunchCount, Record, parted

DOUBTS = 5  # times that launches may differ without a majority of ranks that agree
POLL = (0.0005, 0.02)  # seconds between two queries of the store, at first and at most


class Monitor:
    """The watch over the flights of one attachment on one rank. With one rank there is nothing to watch.

    Args:
        store: the attachment's part of the key-value store, or None with one rank.
        rank, size: of the attachment's group.
        timeout: the age at which a flight is given up.
        abort: aborts all work in the attachment's groups, without waiting.
        broken: returns the network error that those groups have recorded, or "".

    Attributes:
        device: the device of the flights; the CPU until the ranks have agreed on a setup.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta,
        abort: Callable[[], None],
        broken: Callable[[], str] = str,
    ) -> None:
        self.store, self.rank, self.size, self.abort, self.broken = store, rank, size, abort, broken
        self.device = torch.device("cpu")
        self.timeout = timeout.total_seconds()
        self.beat = min(1.0, self.timeout / 10)
        # A silent rank may be starved, compiling or saving. It is taken for dead soon if a connection has broken, too.
        self.patience, self.silence = max(4 * self.beat, min(60.0, self.timeout / 4)), 4 * self.beat
        self.inquiry = min(self.timeout, 6 * self.beat + 1)  # seconds to find out whose fault an error is
        self.error: PeerError | None = None
        self.hasty = False  # the error of a connection ends everything at once; whose fault it is comes out later
        self.failed: Callable[[str], None] = lambda sentence: None  # told when this gives up
        self._beats, self._doubts = 0, 0
        self._left: tuple[str, str] = ("", "")
        self._busy = ""
        self._history = History()
        self._air: dict[Collective, tuple[int, LaunchCount]] = {}  # its lane, and the launches there up to it
        self._board = Board(store, rank, size)
        self._lock, self._over = threading.Lock(), threading.Event()
        self._asked: float | None = None  # time of the query that the store has not answered
        self._broke: float | None = None  # time since which the network has had an error
        self._threads: list[threading.Thread] = []

    # Called by the attachment

    def start(self) -> None:
        """Write the first record and start the threads. Call it before anything collective."""
        if self.size > 1:
            self._write()
            for work, name in ((self._watch, "baguakit monitor"), (self._watch_the_store, "baguakit monitor clock")):
                self._threads.append(threading.Thread(target=work, name=name, daemon=True))
                self._threads[-1].start()

    def launched(self, lane: int, collective: Collective) -> LaunchCount:
        """Watch a collective that is put on a lane, and return the launches there up to it."""
        if self.size == 1:
            return LaunchCount()
        launches = self._history.add(lane, collective.label, collective.step)
        with self._lock:
            self._air[collective] = (lane, launches)
        collective.end(self.error)  # on another thread `fail` may have looked too early to see it
        return launches

    def wait_for(self, collective: Collective) -> Any:
        """Wait for a collective and return its result, or raise an error that names the rank at fault.

        An error of torch about the network is not shown as the cause, since the sentence says more.
        """
        collective.end(self.error)  # `fail` may have ended a placeholder in place of this flight
        try:
            return collective.flight.result()
        except Exception as error:
            found = self._explained(error, collective)
            raise found from found.__cause__
        finally:
            with self._lock:
                self._air.pop(collective, None)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Let the other ranks wait beyond the timeout while the body runs: it may take long."""
        self._busy = what
        if self.size > 1:
            try:
                self._write()
            except Exception as error:
                raise self._lost(error) from None
        try:
            yield
        finally:
            self._busy = ""

    def check(self) -> None:
        """Raise the error that the monitor has found, if any."""
        if self.error is not None:
            raise again(self.error)

    def meet(self, lane: int, launches: LaunchCount) -> None:
        """Wait until all ranks have made the same launches on a lane.

        Raises:
            PeerError: a rank does not.
        """
        if self.size == 1:
            return
        key = f"meet/{lane}/{launches.count}/{launches.digest}"
        self.store.add(key, 1)
        self.wait_until(lambda: int(self.store.add(key, 0)) >= self.size)

    def wait_until(self, there: Callable[[], bool]) -> None:
        """Query the store until `there()` is true, or raise the error that the monitor has found meanwhile."""
        pause, most = POLL
        while not there():
            self.check()
            if self._over.is_set():
                raise PeerError(f"rank {self.rank} has detached")
            time.sleep(pause)
            pause = min(2 * pause, most)

    def _explained(self, error: Exception, collective: Collective) -> Exception:
        """Return the exception to raise for a failed collective: it names the rank at fault if one can be found."""
        if self.error is not None or self.size == 1:
            return again(self.error) if self.error else error
        cause = from_network(error)
        if cause is None:  # the stage's own
            return self._own(f"{collective.label} failed on rank {self.rank}: {type(error).__name__}: {error}", error)
        if self.hasty:
            said = first_line(cause).rpartition("] ")[2].partition(". ")[0]  # gloo's, without its place and advice
            return self._own(f"{collective.label} failed on rank {self.rank}: {said}", error)
        with self._lock:
            lane, launches = self._air.get(collective, (0, self._history.latest().get(0, LaunchCount())))
        judge = Judge(self.rank, self.timeout, self._history)
        deadline = time.monotonic() + self.inquiry
        while time.monotonic() < deadline and self.error is None:
            late = time.time() - collective.launched > self.timeout
            waiting = Waiting(collective.label, lane, launches.count, late, self.silence)
            try:
                found = judge.sentence(waiting, self._board.others())
            except Exception as unreachable:
                return self._lost(unreachable)
            if found:
                return self.fail(found)
            time.sleep(self.beat / 4)
        return self.error or self._own(f"{collective.label} failed on rank {self.rank}: {cause}", error)

    def _own(self, sentence: str, error: Exception) -> PeerError:
        failed = self.fail(sentence)
        failed.__cause__ = error
        return failed

    def compare(self, *ranks: int, sure: bool = False) -> None:
        """Give up if the launches of one of `ranks` differ from this rank's, and the rank at fault is known."""
        if self.size == 1 or self.error is not None:
            return

        def differ(others: set[int], sure: bool) -> str:
            return parted(self.rank, self.size, self._history, self._board.written(others - {self.rank}), sure)

        with contextlib.suppress(RuntimeError):  # the store went with its host: there is nothing to compare with
            if differ({r % self.size for r in ranks}, sure=True):
                self._doubts += 1
                if said := differ(set(range(self.size)), sure or self._doubts > DOUBTS):
                    self.fail(said)

    def leave(self, how: str, why: str = "") -> None:
        """Tell the other ranks that this one leaves, and stop watching. Never waits for them."""
        if self.error is not None:
            how, why = GAVE_UP, str(self.error)
        self._left = (how, why)
        self._over.set()
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.join(self.silence)
        # A thread that is alive is in a call that ends once the store answers or its connection breaks.
        if threads and not any(thread.is_alive() for thread in threads):
            with contextlib.suppress(Exception):  # the store died with its host: nobody is left to read this
                self._write()

    @property
    def left(self) -> bool:
        """Return True once this rank has told the others that it leaves."""
        return bool(self._left[0])

    def alone(self) -> bool:
        """Return True if all other ranks have left, or the store is gone."""
        try:
            return all(record is not None and record.how for record in self._board.others().values())
        except Exception:  # it died with its host
            return True

    # The threads

    def _next(self) -> bool:
        """Sleep until the next heartbeat; return False to stop watching."""
        if self._over.wait(self.beat) or self.error is not None:
            return False
        if self.device.type == "cuda":  # a thread that asks for an event would make a context on GPU 0
            torch.cuda.set_device(self.device)
        return True

    def _watch(self) -> None:
        judge = Judge(self.rank, self.timeout, self._history)
        while self._next():
            self._asked = time.monotonic()
            try:
                self._write()
                self._look(judge)
                if not self._over.is_set():
                    self.compare(self.rank + 1 + self._beats % (self.size - 1))
            except Exception as error:
                if not self._over.is_set() and self._oldest() is not None:
                    self._lost(error)
                    return
            finally:
                self._asked = None

    def _watch_the_store(self) -> None:
        """Report a store that does not answer; the watching thread is blocked in that call."""
        while self._next():
            asked, oldest = self._asked, self._oldest()
            if asked is None or oldest is None or time.time() - oldest[0].launched <= self.timeout:
                continue
            if (silent := time.monotonic() - asked) > self.silence:
                self.fail(store_silent(self.rank, silent, oldest[0].label, self.timeout))

    def _look(self, judge: Judge) -> None:
        oldest = self._oldest()
        if oldest is None:
            return
        collective, lane, launches = oldest
        late = time.time() - collective.launched > self.timeout
        broken = self.broken()
        self._broke = (self._broke or time.monotonic()) if broken else None
        patience = self.silence if broken else self.patience
        waiting = Waiting(collective.label, lane, launches.count, late, patience)
        found = judge.sentence(waiting, self._board.others())
        if not found and self._broke is not None and time.monotonic() - self._broke > self.inquiry:
            found = f"{collective.label} failed on rank {self.rank}: NCCL reports {broken}"
        if found and not self._over.is_set():
            self.fail(found)

    def _oldest(self) -> tuple[Collective, int, LaunchCount] | None:
        """Return the oldest flight that is not done and was launched two heartbeats ago or earlier.

        Younger flights are not queried: on CUDA that queries an event, which would end a graph capture that training
        has begun meanwhile. Nor is any flight after the first that is not done.
        """
        old = time.time() - 2 * self.beat
        with self._lock:
            waiting = sorted((each for each in self._air if each.launched < old), key=lambda each: each.launched)
            first = next((each for each in waiting if not each.flight.done()), None)
            return None if first is None else (first, *self._air[first])

    def _lost(self, error: Exception) -> PeerError:
        return self.fail(store_gone(self.rank, error))

    def fail(self, sentence: str) -> PeerError:
        """Give up: end all flights with a PeerError, and return it. The first sentence is kept."""
        with self._lock:
            self.error = self.error or PeerError(sentence)  # before the look: later flights see it themselves
            waiting = list(self._air)
        for collective in waiting:
            collective.end(self.error)
        if self.device.type == "cuda":  # the host may be blocked in CUDA, where no hook comes to raise it
            print(f"baguakit: {self.error}", file=sys.stderr, flush=True)
        self.abort()
        self.failed(str(self.error))
        return self.error

    def _write(self) -> None:
        self._beats += 1
        self._board.write(Record(self._beats, self._history.latest(), *self._left, self._busy))
