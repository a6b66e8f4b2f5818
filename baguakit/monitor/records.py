"""The record of each rank in the store, which the other ranks read, and the lease of the judge.

Every rank replaces its record there. One key holds the *lease* of the judge, who reads the records of all, and the
verdict. No call makes more than two requests, however many ranks. `multi_get` waits for keys that are absent, so a rank
that has written its first record adds its number to a list, and only the records of ranks in that list are asked for.
The list is read until it is complete.
"""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

LEFT, RAISED, GAVE_UP = "left", "raised", "gave up"
LEASE, CAME = "judge", "came"  # the other keys are ranks


class LaunchCount(NamedTuple):
    """The launches of a rank on one lane: their number, the label of the latest, and a digest of all in order."""

    number: int = 0
    what: str = "nothing"
    digest: int = 0


class Waiting(NamedTuple):
    """The flight that a rank waits for."""

    what: str  # its label
    lane: int
    number: int  # among the launches on that lane
    late: bool  # the timeout is over
    patience: float  # seconds without a heartbeat after which a rank is dead


class Record(NamedTuple):
    """The latest record of one rank."""

    beats: int  # the number of records that the rank has written
    launches: dict[int, LaunchCount]  # by lane
    how: str = ""  # `LEFT`, `RAISED` or `GAVE_UP`; "" while the rank is there
    why: str = ""
    busy: str = ""  # work that may take long and is excluded from timeouts
    waiting: Waiting | None = None  # for a flight that is older than two heartbeats or has failed

    def on(self, lane: int) -> LaunchCount:
        """Return the launches on a lane."""
        return self.launches.get(lane, LaunchCount())

    @classmethod
    def of(cls, text: str | bytes) -> "Record":
        """Return the record that was written as this JSON."""
        beats, launches, how, why, busy, waiting = json.loads(text)
        counts = {int(lane): LaunchCount(*each) for lane, each in launches.items()}
        return cls(beats, counts, how, why, busy, waiting and Waiting(*waiting))


class Lease(NamedTuple):
    """The right to judge."""

    rank: int = -1  # who has it; -1: nobody
    beats: int = 0  # the heartbeats of that rank when it renewed the lease
    verdict: str = ""  # a sentence that names the rank at fault, which ends training on all ranks
    silent: bool = False  # that rank sees another one that has written no heartbeat for long

    def as_text(self) -> str:
        """Return the lease as it is written."""
        return "" if self.rank < 0 else json.dumps(self)

    @classmethod
    def of(cls, text: bytes) -> "Lease":
        """Return the lease that `as_text` has written."""
        return cls(*json.loads(text)) if text else cls()


class Board:
    """The records of all ranks, and the lease of the judge, in the part of a store that only an attachment uses."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._came: frozenset[int] = frozenset()  # ranks that have written a record

    def arrive(self, record: Record) -> None:
        """Write the first record of this rank, before it reads anything."""
        self.write(record)
        self.store.append(CAME, f"{self.rank},")
        self.swap(Lease(), Lease())  # now the key exists

    def write(self, record: Record) -> None:
        """Replace this rank's record."""
        self.store.set(str(self.rank), json.dumps(record))

    def swap(self, before: Lease, after: Lease) -> Lease:
        """Replace the lease if it is still `before`; return the lease that holds from now on."""
        return Lease.of(self.store.compare_set(LEASE, before.as_text(), after.as_text()))

    def glance(self, ranks: Iterable[int]) -> tuple[Lease, dict[int, Record]]:
        """Return the lease, and the records of other ranks in `ranks` that are known to have come."""
        incomplete, peers = len(self._came) < self.size, sorted(set(ranks) & self._came - {self.rank})
        lease, *found = self.store.multi_get([LEASE, *[CAME] * incomplete, *map(str, peers)])
        if incomplete:
            self._read_who_came(found.pop(0))
        return Lease.of(lease), dict(zip(peers, map(Record.of, found), strict=True))

    def written(self, ranks: Iterable[int]) -> dict[int, Record]:
        """Return the records of other ranks in `ranks` that have come."""
        if len(self._came) < self.size:
            self._read_who_came(self.store.get(CAME))
        return self.glance(ranks)[1]

    def others(self) -> dict[int, Record | None]:
        """Return the records of all other ranks; None for a rank that has not written one."""
        written = self.written(range(self.size))
        return {r: written.get(r) for r in range(self.size) if r != self.rank}

    def _read_who_came(self, listed: bytes) -> None:
        self._came = frozenset(map(int, listed.decode().split(",")[:-1]))
        if self.rank not in self._came:  # two ranks have appended to a FileStore at the same time, which keeps one
            self.store.append(CAME, f"{self.rank},")
