"""The record of each rank in the store, which the others read.

A record holds a heartbeat, and for each lane the number of launches, the latest one in words, and a digest of all of
them in order: two ranks whose digests differ after as many launches have parted, even if every message has arrived.
"""

import json
import threading
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

LEFT, RAISED, GAVE_UP = "left", "raised", "gave up"
REMEMBERED = 4096  # launches of a lane whose digests a rank can compare with those of another


@dataclass(frozen=True)
class Launch:
    """The launches of a rank on one lane, up to one.

    Attributes:
        count: how many there are.
        what: the latest one.
        digest: of all of them, in order.
    """

    count: int = 0
    what: str = "nothing"
    digest: int = 0

    def then(self, what: str, step: int | None) -> "Launch":
        """The launches with one more."""
        return Launch(self.count + 1, what, zlib.crc32(f"{what}/{step}".encode(), self.digest))


@dataclass(frozen=True)
class Record:
    """One rank, as it has last written of itself.

    Attributes:
        beats: how often it has written.
        launches: by lane.
        how, why: it left, raised or gave up, and its last words; "" while it is there.
        busy: what it does that may take long, and that no timeout counts; "" for nothing.
    """

    beats: int
    launches: dict[int, Launch]
    how: str = ""
    why: str = ""
    busy: str = ""

    def on(self, lane: int) -> Launch:
        """Its launches on a lane."""
        return self.launches.get(lane, Launch())

    def as_text(self) -> str:
        """The record as it is written."""
        launches = {lane: [each.count, each.what, each.digest] for lane, each in self.launches.items()}
        return json.dumps([self.beats, launches, self.how, self.why, self.busy])

    @classmethod
    def of(cls, text: str | bytes) -> "Record":
        """The record in what was written."""
        beats, launches, how, why, busy = json.loads(text)
        return cls(beats, {int(lane): Launch(*each) for lane, each in launches.items()}, how, why, busy)


class Board:
    """Where ranks write their records, and read those of the others.

    Args:
        store: the attachment's part of the key-value store.
        rank, size: of the attachment's group.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._known: set[int] = set()  # ranks that have written a record

    def write(self, record: Record) -> None:
        """Put this rank's record in the place of its last one."""
        self.store.set(str(self.rank), record.as_text())

    def written(self, ranks: set[int]) -> dict[int, Record]:
        """Return the records of those among `ranks` that have written one."""
        self._known |= {r for r in ranks - self._known if self.store.check([str(r)])}  # `get` would wait for a key
        return {r: Record.of(self.store.get(str(r))) for r in sorted(ranks & self._known)}

    def others(self) -> dict[int, Record | None]:
        """Return the records of all other ranks; None for one that has not written any."""
        others = [r for r in range(self.size) if r != self.rank]
        written = self.written(set(others))
        return {r: written.get(r) for r in others}


@dataclass(eq=False)
class History:
    """The launches of this rank on each lane; threads may share it."""

    before: dict[int, deque[Launch]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, lane: int, what: str, step: int | None) -> Launch:
        """One more launch."""
        with self.lock:
            known = self.before.setdefault(lane, deque([Launch()], maxlen=REMEMBERED))
            known.append(known[-1].then(what, step))
            return known[-1]

    def latest(self) -> dict[int, Launch]:
        """The launches so far, by lane."""
        with self.lock:
            return {lane: known[-1] for lane, known in self.before.items()}

    def at(self, lane: int, count: int) -> Launch | None:
        """The launches up to the `count`-th, if that is not too long ago and has been."""
        with self.lock:
            known = self.before.get(lane)
            if not known or not known[0].count <= count <= known[-1].count:
                return None
            return known[count - known[0].count]


def parted(rank: int, size: int, history: History, records: dict[int, Record], sure: bool) -> str:
    """Return the sentence on ranks that have launched other things in the same place; "" if none have.

    Those that stand against more than half of all are at fault. Where there is no such half, nobody is named before
    the caller is `sure` that waiting will not show one; and then both sides are.
    """
    for lane in history.latest():
        here = {r: (record.on(lane), history.at(lane, record.on(lane).count)) for r, record in records.items()}
        known = {r: (theirs, ours) for r, (theirs, ours) in here.items() if ours is not None and theirs.count}
        others = [r for r, (theirs, ours) in known.items() if theirs.digest != ours.digest]
        if not others:
            continue
        first = min(known[r][0].count for r in others)  # an older record, which still agrees, says nothing
        alike = sorted([rank, *(r for r, (theirs, _) in known.items() if r not in others and theirs.count >= first)])
        theirs, ours = known[others[0]]
        few, many = (
            ((others, theirs), (alike, ours)) if len(others) <= len(alike) else ((alike, ours), (others, theirs))
        )
        if 2 * len(many[0]) <= size and not sure and size > 2:
            continue
        return _sentence(*few, *many, alone=len(few[0]) < len(many[0]))
    return ""


def _sentence(few: list[int], a: Launch, many: list[int], b: Launch, alone: bool) -> str:
    have = "has" if len(few) == 1 and alone else "have"
    head = (
        f"{_ranks(few)} {have} parted from {_ranks(many)}" if alone else f"{_ranks(few)} and {_ranks(many)} have parted"
    )
    late = ", in another step or after other launches" if a.what == b.what else ""
    return (
        f"{head}: as launch {a.count}, {_ranks(few)} made {a.what}, and {_ranks(many)} {b.what}{late}; "
        "all ranks must make the same calls, backward passes and steps in the same order, from the same state"
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
