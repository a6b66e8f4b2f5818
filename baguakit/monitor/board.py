"""The board: what ranks tell each other through the store. No call makes more than two requests, however many ranks.

Every rank replaces its record there. One key holds the *lease* of the judge, who reads the records of all, and the
verdict. `multi_get` waits for keys that are absent, so a rank that has written its first record adds its number to a
list, and only the records of ranks in that list are asked for. The list is read until it is complete.
"""

import json
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

from .records import Record

LEASE, CAME = "judge", "came"  # the other keys are ranks


@dataclass(frozen=True)
class Lease:
    """The right to judge.

    Attributes:
        rank: who has it; -1: nobody.
        beats: the heartbeats of that rank when it renewed the lease.
        verdict: a sentence that names the rank at fault, which ends training on all ranks; "" while there is none.
        silent: that rank sees another one that has written no heartbeat for long.
    """

    rank: int = -1
    beats: int = 0
    verdict: str = ""
    silent: bool = False

    def as_text(self) -> str:
        """Return the lease as it is written."""
        return "" if self.rank < 0 else json.dumps(astuple(self))

    @classmethod
    def of(cls, text: bytes) -> "Lease":
        """Return the lease that `as_text` has written."""
        return cls(*json.loads(text)) if text else cls()


class Board:
    """The records of all ranks, and the lease of the judge, in a key-value store.

    Args:
        store: the part of the store that only the attachment uses.
        rank, size: of the attachment's group.
    """

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
        self.store.set(str(self.rank), record.as_text())

    def swap(self, before: Lease, after: Lease) -> Lease:
        """Replace the lease if it is still `before`; return the lease that holds from now on."""
        return Lease.of(self.store.compare_set(LEASE, before.as_text(), after.as_text()))

    def glance(self, ranks: Iterable[int]) -> tuple[Lease, dict[int, Record]]:
        """Return the lease, and the records of those of `ranks` that are known to have come, but for this rank's."""
        incomplete, peers = len(self._came) < self.size, sorted(set(ranks) & self._came - {self.rank})
        lease, *found = self.store.multi_get([LEASE, *([CAME] if incomplete else []), *map(str, peers)])
        if incomplete:
            self._read_who_came(found.pop(0))
        return Lease.of(lease), dict(zip(peers, map(Record.of, found), strict=True))

    def written(self, ranks: Iterable[int]) -> dict[int, Record]:
        """Return the records of those of `ranks` that have come, without this rank's own."""
        if len(self._came) < self.size:
            self._read_who_came(self.store.get(CAME))
        known = sorted(set(ranks) & self._came - {self.rank})
        texts = self.store.multi_get([str(r) for r in known]) if known else []
        return dict(zip(known, map(Record.of, texts), strict=True))

    def others(self) -> dict[int, Record | None]:
        """Return the records of all other ranks; None for a rank that has not written one."""
        written = self.written(range(self.size))
        return {r: written.get(r) for r in range(self.size) if r != self.rank}

    def _read_who_came(self, listed: bytes) -> None:
        self._came = frozenset(map(int, listed.decode().split(",")[:-1]))
        if self.rank not in self._came:  # two ranks have appended to a FileStore at the same time, which keeps one
            self.store.append(CAME, f"{self.rank},")
