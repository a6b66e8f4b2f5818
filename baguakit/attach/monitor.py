"""Who is missing when a flight does not arrive.

Each rank writes a record of itself to the store: a heartbeat, its latest launch on each lane, and how it left. A flight
that is late, or that failed, is looked up in the records of the others, and the rank at fault is named. With every
heartbeat a rank compares its launches with those of one other, so that ranks which have parted do not train on.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NoReturn

import torch

from .errors import PeerError as PeerError
from .errors import again, from_network
from .judging import Judge, Traveller, Waiting, store_gone, store_silent
from .records import GAVE_UP, Board, History, Launch, Record, parted

DOUBTS = 5  # how often launches may differ without a majority of ranks that agree
POLL = (0.0005, 0.02)  # seconds between two questions to the store, at first and at most


class Monitor:
    """Watches the flights of one attachment on one rank. With one rank there is nothing to watch.

    Args:
        store: the attachment's part of the key-value store, or None with one rank.
        rank, size: of the attachment's group.
        timeout: the age at which a flight is given up.
        abort: gives up whatever is under way in the attachment's groups, without waiting.
        broken: returns the error that the network has noted in those groups, or "".

    Attributes:
        device: where flights are; that of the CPU until the ranks have agreed on a plan.
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
        self._beats, self._doubts = 0, 0
        self._left: tuple[str, str] = ("", "")
        self._busy = ""
        self._history = History()
        self._air: dict[Traveller, tuple[int, Launch]] = {}  # lane, and the launches there up to this one
        self._board = Board(store, rank, size)
        self._lock, self._over = threading.Lock(), threading.Event()
        self._asked: float | None = None  # since when the store owes an answer
        self._broke: float | None = None  # since when the network has an error
        self._thread: threading.Thread | None = None
        self._clock: threading.Thread | None = None

    # What the attachment tells

    def start(self) -> None:
        """Write the first record, and watch. All that ranks do together comes after this."""
        if self.size > 1:
            self._write()
            self._thread = threading.Thread(target=self._watch, name="baguakit monitor", daemon=True)
            self._thread.start()
            self._clock = threading.Thread(target=self._watch_the_store, name="baguakit monitor clock", daemon=True)
            self._clock.start()

    def launched(self, lane: int, trip: Traveller) -> Launch:
        """A flight is put on a lane. Returns the launches there, up to this one."""
        if self.size == 1:
            return Launch()
        launch = self._history.add(lane, str(trip), trip.step)
        with self._lock:
            self._air[trip] = (lane, launch)
        return launch

    def landed(self, trip: Traveller) -> None:
        """A flight has ended, one way or the other."""
        with self._lock:
            self._air.pop(trip, None)

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """In the body this rank does something that may take long: the others wait for it beyond the timeout."""
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
        """Raise what the monitor has found out, if anything."""
        if self.error is not None:
            raise again(self.error)

    def meet(self, lane: int, launch: Launch) -> None:
        """Wait until all ranks have come to the same launch, after the same ones.

        Raises:
            PeerError: the monitor has found out that one does not come.
        """
        if self.size == 1:
            return
        key = f"meet/{lane}/{launch.count}/{launch.digest}"
        self.store.add(key, 1)
        self.wait_until(lambda: int(self.store.add(key, 0)) >= self.size)

    def wait_until(self, there: Callable[[], bool]) -> None:
        """Ask the store until the answer is yes, or raise what the monitor has found out meanwhile."""
        pause, most = POLL
        while not there():
            self.check()
            if self._over.is_set():
                raise PeerError(f"rank {self.rank} has detached")
            time.sleep(pause)
            pause = min(2 * pause, most)

    def reraise(self, error: Exception, trip: Traveller) -> NoReturn:
        """Raise, for a flight that failed, what names the rank at fault, where one can be found.

        What torch says of the network is not shown as its cause, since the sentence says more.
        """
        found = self.explained(error, trip)
        raise found from found.__cause__

    def explained(self, error: Exception, trip: Traveller) -> Exception:
        """The exception to raise for a flight that failed: one that names the rank at fault, where one can be found."""
        if self.error is not None or self.size == 1:
            return again(self.error) if self.error else error
        cause = from_network(error)
        if cause is None:  # the stage's own
            return self._own(f"{trip} failed on rank {self.rank}: {type(error).__name__}: {error}", error)
        with self._lock:
            lane, launch = self._air.get(trip, (0, self._history.latest().get(0, Launch())))
        judge = Judge(self.rank, self.timeout, self._history)
        deadline = time.monotonic() + self.inquiry
        while time.monotonic() < deadline and self.error is None:
            late = time.time() - trip.launched > self.timeout
            waiting = Waiting(str(trip), lane, launch.count, late, self.silence)
            try:
                found = judge.sentence(waiting, self._board.others())
            except Exception as unreachable:
                return self._lost(unreachable)
            if found:
                return self.fail(found)
            time.sleep(self.beat / 4)
        return self.error or self._own(f"{trip} failed on rank {self.rank}: {cause}", error)

    def _own(self, sentence: str, error: Exception) -> PeerError:
        failed = self.fail(sentence)
        failed.__cause__ = error
        return failed

    def compare(self, *ranks: int, sure: bool = False) -> None:
        """Give up if one of `ranks` has launched other things than this rank, and it is known who is at fault."""
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
        """Tell the others that this rank is going, and stop watching. Never waits for them."""
        if self.error is not None:
            how, why = GAVE_UP, str(self.error)
        self._left = (how, why)
        self._over.set()
        if self._thread is not None and self._clock is not None:
            self._clock.join()
            self._thread.join(self.silence)
            stuck, self._thread, self._clock = self._thread.is_alive(), None, None
            if stuck:  # in a call that ends once the store answers or its connection breaks; nothing gets through
                return
            try:
                self._write()
            except Exception:  # the store died with its host: nobody is left to read this
                return

    @property
    def left(self) -> bool:
        """Whether it has told the others that it is going."""
        return bool(self._left[0])

    def alone(self) -> bool:
        """Return whether all others have left as well, or the store is gone."""
        try:
            return all(record is not None and record.how for record in self._board.others().values())
        except Exception:  # it died with its host
            return True

    # The threads

    def _next(self) -> bool:
        """Sleep until the next heartbeat; return whether to go on watching."""
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
        """Speak where the other thread cannot: it waits for a store from which no word comes."""
        while self._next():
            asked, oldest = self._asked, self._oldest()
            if asked is None or oldest is None or time.time() - oldest[0].launched <= self.timeout:
                continue
            if (silent := time.monotonic() - asked) > self.silence:
                self.fail(store_silent(self.rank, silent, str(oldest[0]), self.timeout))

    def _look(self, judge: Judge) -> None:
        oldest = self._oldest()
        if oldest is None:
            return
        trip, lane, launch = oldest
        late = time.time() - trip.launched > self.timeout
        broken = self.broken()
        self._broke = (self._broke or time.monotonic()) if broken else None
        waiting = Waiting(str(trip), lane, launch.count, late, self.silence if broken else self.patience)
        found = judge.sentence(waiting, self._board.others())
        if not found and self._broke is not None and time.monotonic() - self._broke > self.inquiry:
            found = f"{trip} failed on rank {self.rank}: NCCL reports {broken}"
        if found and not self._over.is_set():
            self.fail(found)

    def _oldest(self) -> "tuple[Traveller, int, Launch] | None":
        """Return the flight that has been in the air for longest, if for two heartbeats.

        No younger one is asked whether it is done: on CUDA that queries an event, which would end a graph capture that
        training has begun meanwhile. And no flight is asked after the first that is not done.
        """
        old = time.time() - 2 * self.beat
        with self._lock:
            waiting = sorted((trip for trip in self._air if trip.launched < old), key=lambda trip: trip.launched)
            trip = next((trip for trip in waiting if not trip.flight.done()), None)
            return None if trip is None else (trip, *self._air[trip])

    def _lost(self, error: Exception) -> PeerError:
        return self.fail(store_gone(self.rank, error))

    def fail(self, sentence: str) -> PeerError:
        """Give up: end all flights with a PeerError, and return it. The first sentence stays."""
        self.error = self.error or PeerError(sentence)
        with self._lock:
            trips = list(self._air)
        for trip in trips:
            trip.flight.fail(self.error)
        if self.device.type == "cuda":  # the host may be blocked in CUDA, where no hook comes to raise it
            print(f"baguakit: {self.error}", file=sys.stderr, flush=True)
        self.abort()
        return self.error

    def _write(self) -> None:
        self._beats += 1
        self._board.write(Record(self._beats, self._history.latest(), *self._left, self._busy))
