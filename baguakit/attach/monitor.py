"""Who is missing when a flight does not arrive.

Each rank writes a record of itself to the store: a heartbeat, its latest launch on each lane, and how it left. A flight
that is late, or that failed, is looked up in the records of the others, and the rank at fault is named.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from ..lanes import Flight

LEFT, RAISED, GAVE_UP = "left", "raised", "gave up"


class Traveller(Protocol):
    """What the monitor knows of a trip."""

    @property
    def flight(self) -> Flight: ...

    launched: float

    def __str__(self) -> str: ...


class PeerError(RuntimeError):
    """A rank is dead, late, gone or has raised: the message names it."""


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
        self, store: Any, rank: int, size: int, timeout: timedelta, abort: Callable[[], None], loud: bool
    ) -> None:
        self.store, self.rank, self.size, self.abort, self.loud = store, rank, size, abort, loud
        self.timeout = timeout.total_seconds()
        self.beat = min(1.0, self.timeout / 10)
        # A silent rank may be starved, compiling or saving. It is taken for dead soon if a connection has broken, too.
        self.patience, self.silence = max(4 * self.beat, min(60.0, self.timeout / 4)), 4 * self.beat
        self.error: PeerError | None = None
        self._beats = 0
        self._left: tuple[str, str] = ("", "")
        self._counts: dict[int, int] = {}  # launches by lane
        self._latest: dict[int, str] = {}
        self._air: dict[Traveller, tuple[int, int]] = {}  # lane, and the ordinal of the launch there
        self._lock, self._over = threading.Lock(), threading.Event()
        self._asked: float | None = None  # since when the store owes an answer
        self._thread: threading.Thread | None = None
        self._clock: threading.Thread | None = None

    # What the attachment tells

    def start(self) -> None:
        """Write the first record. All ranks do this before they wait for each other, so that every record exists."""
        if self.size > 1:
            self._write()
            self._thread = threading.Thread(target=self._watch, name="baguakit monitor", daemon=True)
            self._thread.start()
            self._clock = threading.Thread(target=self._watch_the_store, name="baguakit monitor clock", daemon=True)
            self._clock.start()

    def launched(self, lane: int, trip: Traveller) -> None:
        """A flight has been put on a lane."""
        if self.size > 1:
            with self._lock:
                self._counts[lane] = self._counts.get(lane, 0) + 1
                self._latest[lane] = str(trip)
                self._air[trip] = (lane, self._counts[lane])

    def landed(self, lane: int, trip: Traveller) -> None:
        """A flight has ended, one way or the other."""
        with self._lock:
            self._air.pop(trip, None)

    def check(self) -> None:
        """Raise what the monitor has found out, if anything."""
        if self.error is not None:
            raise self.error

    def explained(self, error: Exception, trip: Traveller) -> Exception:
        """The exception to raise for a flight that failed: one that names the rank at fault, where one can be found."""
        if self.error is not None or self.size == 1:
            return self.error or error
        # torch may wrap the error of a group that it has not made itself in one about its own log.
        cause = error.__context__ if isinstance(error.__context__, RuntimeError) else error
        if not isinstance(cause, RuntimeError):  # the stage's own: whatever befalls the network is a RuntimeError
            return self._fail(f"{trip} failed on rank {self.rank}: {type(cause).__name__}: {cause}")
        with self._lock:
            lane, count = self._air.get(trip, (0, self._counts.get(0, 0)))
        seen: dict[int, tuple[int, float]] = {}
        deadline = time.monotonic() + min(self.timeout, 6 * self.beat + 1)
        while time.monotonic() < deadline and self.error is None:
            late = time.time() - trip.launched > self.timeout
            try:
                found = self._judge(str(trip), lane, count, seen, late, self.silence)
            except Exception as unreachable:
                return self._lost(unreachable)
            if found:
                return self._fail(found)
            time.sleep(self.beat / 4)
        return self.error or self._fail(f"{trip} failed on rank {self.rank}: {cause}")

    def leave(self, how: str, why: str = "") -> None:
        """Tell the others that this rank is going, and stop watching. Never waits for them."""
        if how == RAISED and self.error is not None:
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

    # The threads

    def _watch(self) -> None:
        seen: dict[int, tuple[int, float]] = {}
        while not self._over.wait(self.beat) and self.error is None:
            try:
                self._write()
                self._look(seen)
            except Exception as error:
                if not self._over.is_set() and self._oldest() is not None:
                    self._lost(error)
                    return

    def _watch_the_store(self) -> None:
        """Speak where the other thread cannot: it waits for a store from which no word comes."""
        while not self._over.wait(self.beat) and self.error is None:
            asked, oldest = self._asked, self._oldest()
            if asked is None or oldest is None or time.time() - oldest[0].launched <= self.timeout:
                continue
            if (silent := time.monotonic() - asked) > self.silence:
                self._fail(
                    f"rank {self.rank} has had no answer from the store, which rank 0 or torchrun holds, for "
                    f"{silent:.1f} s, and {oldest[0]} has not arrived within {self.timeout:g} s: "
                    "the link between the two hosts is down, or that host stands still"
                )

    def _look(self, seen: dict[int, tuple[int, float]]) -> None:
        oldest = self._oldest()
        if oldest is None:
            return
        trip, lane, count = oldest
        age = time.time() - trip.launched
        if age > 2 * self.beat:
            found = self._judge(str(trip), lane, count, seen, age > self.timeout, self.patience)
            if found and not self._over.is_set():
                self._fail(found)

    def _oldest(self) -> "tuple[Traveller, int, int] | None":
        with self._lock:
            waiting = [(trip, *place) for trip, place in self._air.items() if not trip.flight.done()]
        return min(waiting, key=lambda each: each[0].launched, default=None)

    def _lost(self, error: Exception) -> PeerError:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return self._fail(
            f"rank {self.rank} cannot reach the store any more: the process that holds it, rank 0 or torchrun, is gone "
            f"({why})"
        )

    def _fail(self, sentence: str) -> PeerError:
        self.error = self.error or PeerError(sentence)
        with self._lock:
            trips = list(self._air)
        for trip in trips:
            trip.flight.fail(self.error)
        if self.loud:
            print(f"baguakit: {sentence}", file=sys.stderr, flush=True)
        self.abort()
        return self.error

    # The records

    def _write(self) -> None:
        self._beats += 1
        with self._lock:
            launches = {str(lane): [self._counts[lane], self._latest[lane]] for lane in self._counts}
        self.store.set(str(self.rank), json.dumps([self._beats, launches, *self._left]))

    def _judge(
        self, waiting_for: str, lane: int, count: int, seen: dict[int, tuple[int, float]], late: bool, patience: float
    ) -> str:
        """The sentence that names the rank at fault, or "" if none can be named yet.

        A rank without a new heartbeat for `patience` seconds is dead; one that is behind when the flight is late, late.
        """
        now = time.monotonic()
        others = [r for r in range(self.size) if r != self.rank]
        self._asked = now
        try:
            records = {r: json.loads(self.store.get(str(r))) for r in others}
        finally:
            self._asked = None
        behind = []
        for r, (beats, launches, how, why) in records.items():
            done, latest = launches.get(str(lane), [0, "nothing"])
            if how == GAVE_UP:
                return str(why)
            if how == RAISED:
                return f"rank {r} raised {why} after {latest}; rank {self.rank} waits for it in {waiting_for}"
            if how == LEFT and done < count:
                return (
                    f"rank {r} has left after {latest}, and rank {self.rank} waits for it in {waiting_for}; "
                    "give every rank the same number of steps"
                )
            if seen.get(r, (0, now))[0] != beats:
                seen[r] = (beats, now)
            elif not how and (silent := now - seen[r][1]) > patience:
                return (
                    f"rank {r} is dead: no sign of it for {silent:.1f} s; its latest launch known is {latest}, "
                    f"and rank {self.rank} waits for it in {waiting_for}"
                )
            if done < count:
                behind.append((done, r, latest))
        if late and behind:
            _, r, latest = min(behind)
            return (
                f"rank {r} is late: it has not launched {waiting_for} within {self.timeout:g} s; "
                f"its latest launch known is {latest}"
            )
        if late:
            return f"all ranks have launched {waiting_for}, and it has not arrived within {self.timeout:g} s"
        return ""
