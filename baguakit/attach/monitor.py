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
from typing import Any, NoReturn, Protocol

from ..lanes import Flight
from .errors import PeerError as PeerError
from .errors import again, from_network
from .judging import Judge, Waiting, store_gone, store_silent
from .records import GAVE_UP, History, Launch, Record, parted

DOUBTS = 5  # how often launches may differ without a majority of ranks that agree
POLL = (0.0005, 0.02)  # seconds between two questions to the store, at first and at most


class Traveller(Protocol):
    """What the monitor knows of a trip."""

    @property
    def flight(self) -> Flight: ...

    launched: float

    @property
    def step(self) -> int | None: ...

    def __str__(self) -> str: ...


class Monitor:
    """Watches the flights of one attachment on one rank. With one rank there is nothing to watch.

    Args:
        store: the attachment's part of the key-value store, or None with one rank.
        rank, size: of the attachment's group.
        timeout: the age at which a flight is given up.
        abort: gives up whatever is under way in the attachment's groups, without waiting.
        loud: print the sentence as well, where the host may be blocked in CUDA and no hook will come to raise it.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, abort: Callable[[], None], loud: bool = False
    ) -> None:
        self.store, self.rank, self.size, self.abort, self.loud = store, rank, size, abort, loud
        self.timeout = timeout.total_seconds()
        self.beat = min(1.0, self.timeout / 10)
        # A silent rank may be starved, compiling or saving. It is taken for dead soon if a connection has broken, too.
        self.patience, self.silence = max(4 * self.beat, min(60.0, self.timeout / 4)), 4 * self.beat
        self.error: PeerError | None = None
        self._beats, self._doubts = 0, 0
        self._left: tuple[str, str] = ("", "")
        self._busy = ""
        self._history = History()
        self._air: dict[Traveller, tuple[int, Launch]] = {}  # lane, and the launches there up to this one
        self._known: set[int] = set()  # ranks that have written a record
        self._lock, self._over = threading.Lock(), threading.Event()
        self._asked: float | None = None  # since when the store owes an answer
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
        deadline = time.monotonic() + min(self.timeout, 6 * self.beat + 1)
        while time.monotonic() < deadline and self.error is None:
            late = time.time() - trip.launched > self.timeout
            waiting = Waiting(str(trip), lane, launch.count, late, self.silence)
            try:
                found = judge.sentence(waiting, self._records())
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
            return parted(self.rank, self.size, self._history, self._written(others - {self.rank}), sure)

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
            return all(record is not None and record.how for record in self._records().values())
        except Exception:  # it died with its host
            return True

    # The threads

    def _watch(self) -> None:
        judge = Judge(self.rank, self.timeout, self._history)
        while not self._over.wait(self.beat) and self.error is None:
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
        while not self._over.wait(self.beat) and self.error is None:
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
        age = time.time() - trip.launched
        if age > 2 * self.beat:
            waiting = Waiting(str(trip), lane, launch.count, age > self.timeout, self.patience)
            found = judge.sentence(waiting, self._records())
            if found and not self._over.is_set():
                self.fail(found)

    def _oldest(self) -> "tuple[Traveller, int, Launch] | None":
        with self._lock:
            waiting = [(trip, *place) for trip, place in self._air.items() if not trip.flight.done()]
        return min(waiting, key=lambda each: each[0].launched, default=None)

    def _lost(self, error: Exception) -> PeerError:
        return self.fail(store_gone(self.rank, error))

    def fail(self, sentence: str) -> PeerError:
        """Give up: end all flights with a PeerError, and return it. The first sentence stays."""
        self.error = self.error or PeerError(sentence)
        with self._lock:
            trips = list(self._air)
        for trip in trips:
            trip.flight.fail(self.error)
        if self.loud:
            print(f"baguakit: {self.error}", file=sys.stderr, flush=True)
        self.abort()
        return self.error

    # The records

    def _write(self) -> None:
        self._beats += 1
        record = Record(self._beats, self._history.latest(), *self._left, self._busy)
        self.store.set(str(self.rank), record.as_text())

    def _records(self) -> dict[int, Record | None]:
        """Those of all other ranks; None for one that has not written any."""
        others = [r for r in range(self.size) if r != self.rank]
        written = self._written(set(others))
        return {r: written.get(r) for r in others}

    def _written(self, ranks: set[int]) -> dict[int, Record]:
        """The records of those among `ranks` that have written one."""
        self._known |= {r for r in ranks - self._known if self.store.check([str(r)])}  # `get` would wait for a key
        return {r: Record.of(self.store.get(str(r))) for r in sorted(ranks & self._known)}
