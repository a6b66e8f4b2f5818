"""Keep the launches of a rank, its record in the store, which the other ranks read, and the lease of the judge.

Every rank has one record in the store, which it overwrites. One key holds the verdict and the *lease* of the judge, the
rank that reads all records. After the start, a call makes at most two requests, for any number of ranks. `multi_get`
waits for keys that are absent. So a rank that has written its first record adds its number to a list, and only records
of ranks in that list are requested. The list is read until it is complete.
"""

import json
import threading
import time
import zlib
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..lanes import Flight

LEFT, RAISED, GAVE_UP = "left", "raised", "gave up"
LEASE, CAME = "judge", "came"  # the other keys are ranks
MESSAGES = -1  # the lane of messages between two ranks
REMEMBERED = 4096  # launches of a lane whose digests a rank can compare with another rank's


class LaunchCount(NamedTuple):
    """The launches of a rank on one lane: their number, the label of the latest, and a digest of the whole sequence."""

    number: int = 0
    what: str = "nothing"
    digest: int = 0


@dataclass(eq=False, kw_only=True)
class Collective:
    """Work that all ranks do together on a lane."""

    label: str  # the same on all ranks
    shared: bool = True  # whether all ranks launch it, so that it counts
    step: int | None = None  # in which it was launched; None if ranks may be at different ones
    flight: Flight = field(default_factory=Flight)  # at first a placeholder
    launched: float = field(default_factory=time.time)
    lane: int = MESSAGES  # its number
    launches: LaunchCount = field(default_factory=LaunchCount)  # on that lane up to this
    failed: bool = False  # its rank does not know yet whose fault it is
    landed: bool = False  # the host, or on a GPU a stream, has waited for it


class Air:
    """The launches of this rank, and collectives that have not landed or that a device still works on. Thread-safe."""

    def __init__(self) -> None:
        self._launches: dict[int, deque[LaunchCount]] = {}  # by lane
        self._held: list[Collective] = []  # in their order; those that have landed are dropped at the next look
        self._passed: dict[int, Collective] = {}  # by lane
        self._first: Collective | None = None
        self.since = 0.0  # the time at which the one that is waited for was launched, or the one before it ended
        self._lock = threading.RLock()

    def launch(self, lane: int, collective: Collective) -> LaunchCount:
        """Add a collective that is put on a lane, and return the lane's launches up to this collective."""
        with self._lock:
            known = self._launches.get(lane) or self._launches.setdefault(lane, deque([LaunchCount()], REMEMBERED))
            (number, _, digest), what = known[-1], collective.label
            if collective.shared:
                known.append(LaunchCount(number + 1, what, zlib.crc32(f"{what}/{collective.step}".encode(), digest)))
            count = known[-1]
            collective.lane, collective.launches = lane, count
            if self._held and self._held[0].landed:
                self.all()
            self._held.append(collective)
        return count

    def latest(self) -> dict[int, LaunchCount]:
        with self._lock:
            return {lane: known[-1] for lane, known in self._launches.items()}

    def at(self, lane: int, count: int) -> LaunchCount | None:
        """Return the LaunchCount after `count` launches on a lane; None if it is not known yet, or no longer kept."""
        with self._lock:
            known = self._launches.get(lane)
            if not known or not known[0].number <= count <= known[-1].number:
                return None
            return known[count - known[0].number]

    def failed(self, collective: Collective) -> None:
        """Record that a collective has failed, and that this rank does not know yet which rank is at fault."""
        with self._lock:
            collective.failed = True
            if collective not in self._held:
                collective.lane = 0
                collective.launches = self._launches.get(0, [LaunchCount()])[-1]
                self._held.append(collective)

    def watch(self, message: Collective) -> None:
        """Keep the latest message between two ranks. It is not among the launches that all ranks make."""
        with self._lock:
            self._passed[MESSAGES] = message

    def all(self) -> list[Collective]:
        """Return all collectives that have not landed. Record which landed collectives a device may still work on."""
        with self._lock:
            self._passed |= {each.lane: each for each in self._held if each.landed and each.flight.on_device}
            self._held = [each for each in self._held if not each.landed]
            return self._held

    def passed(self) -> bool:
        """Return whether there is a collective that the host has waited for, but a device may still work on."""
        self.all()
        return bool(self._passed)

    def awaited(self, before: float, passed_before: float) -> tuple[Collective | None, bool]:
        """Return the collective that this rank waits for, if any, and whether it has failed.

        It is the oldest collective that has failed. If none has failed, it is the oldest that is not done and was
        launched before the time `before`. If there is none, it is a collective that the host has waited for, but the
        device has not done, and that was launched before the time `passed_before`.

        No more flights are queried than needed, because on CUDA a query of an event would end a graph capture that
        training has begun meanwhile.
        """
        with self._lock:
            held = sorted(self.all(), key=lambda each: each.launched)
            if failed := next((each for each in held if each.failed), None):
                self.since = failed.launched
                return failed, True
            old = (each for each in held if each.launched < before)
            first = next((each for each in old if not (each.flight.done() or each.flight.held)), None)
            last, self._first = self._first, first
            if first is not None:
                if first is not last:
                    self.since = first.launched if last is None else max(first.launched, time.time())
                return first, False
            for lane, each in list(self._passed.items()):
                if each.launched < passed_before:
                    if not each.flight.done():
                        self.since = each.launched
                        return each, False
                    del self._passed[lane]
            return None, False


class Waiting(NamedTuple):
    what: str  # its label
    lane: int
    number: int  # among the launches on that lane
    late: bool  # the timeout is over
    patience: float  # seconds without a heartbeat after which a rank is dead


class Record(NamedTuple):
    beats: int  # the number of records that the rank has written
    launches: dict[int, LaunchCount]  # by lane
    how: str = ""  # `LEFT`, `RAISED` or `GAVE_UP`; "" while the rank is there
    why: str = ""
    busy: str = ""  # work that may take long and is excluded from timeouts
    waiting: Waiting | None = None  # for a flight that is older than two heartbeats or has failed

    def on(self, lane: int) -> LaunchCount:
        return self.launches.get(lane, LaunchCount())

    @classmethod
    def of(cls, text: str | bytes) -> "Record":
        """Return the record that was written as the JSON `text`."""
        beats, launches, how, why, busy, waiting = json.loads(text)
        counts = {int(lane): LaunchCount(*each) for lane, each in launches.items()}
        return cls(beats, counts, how, why, busy, waiting and Waiting(*waiting))


class Lease(NamedTuple):
    """The lease of the judge: which rank may judge, and its verdict."""

    rank: int = -1  # who has it; -1: nobody
    beats: int = 0  # the heartbeats of that rank when it renewed the lease
    verdict: str = ""  # a sentence that names the rank at fault, which ends training on all ranks
    silent: bool = False  # that rank sees another one that has written no heartbeat for long

    @classmethod
    def of(cls, text: bytes) -> "Lease":
        """Return the lease that was written as the JSON `text`, which is "" if no rank has the lease."""
        return cls(*json.loads(text)) if text else cls()


class Board:
    """The records of all ranks and the lease of the judge, in one attachment's part of a store."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._came: frozenset[int] = frozenset()  # ranks that have written a record

    def arrive(self, record: Record) -> None:
        """Write the first record of this rank, before any other call."""
        self.write(record)
        self.store.append(CAME, f"{self.rank},")
        self.swap(Lease(), Lease())  # now the key exists

    def write(self, record: Record) -> None:
        self.store.set(str(self.rank), json.dumps(record))

    def swap(self, before: Lease, after: Lease) -> Lease:
        """Replace the lease by `after` if it is still `before`; return the lease that is valid from now on."""
        texts = ("" if each.rank < 0 else json.dumps(each) for each in (before, after))
        return Lease.of(self.store.compare_set(LEASE, *texts))

    def glance(self, ranks: Iterable[int]) -> tuple[Lease, dict[int, Record]]:
        """Return the lease, and {rank: record} of other ranks in `ranks` that have written a record."""
        if len(self._came) < self.size:
            self._came = frozenset(map(int, self.store.get(CAME).decode().split(",")[:-1]))
            if self.rank not in self._came:  # two ranks have appended to a FileStore at the same time, which keeps one
                self.store.append(CAME, f"{self.rank},")
        peers = sorted(set(ranks) & self._came - {self.rank})
        lease, *found = self.store.multi_get([LEASE, *map(str, peers)])
        return Lease.of(lease), dict(zip(peers, map(Record.of, found), strict=True))
