"""The record of each rank in the store, which the other ranks read.

A record holds a heartbeat, the flight that the rank waits for, and for each lane the number of launches, the label of
the latest, and a digest of all of them in order. Two ranks have diverged if their digests differ after equally many
launches, even if all messages arrived.

`differing` compares launches: it finds the ranks that have diverged from the others.
"""

import json
import threading
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

LEFT, RAISED, GAVE_UP = "left", "raised", "gave up"
REMEMBERED = 4096  # launches of a lane whose digests a rank can compare with those of another


@dataclass(frozen=True)
class LaunchCount:
    """A count of the launches of a rank on one lane.

    Attributes:
        count: the number of launches.
        what: the label of the latest.
        digest: a checksum of all labels and steps, in order.
    """

    count: int = 0
    what: str = "nothing"
    digest: int = 0

    def then(self, what: str, step: int | None) -> "LaunchCount":
        """Return the count after one more launch."""
        return LaunchCount(self.count + 1, what, zlib.crc32(f"{what}/{step}".encode(), self.digest))


@dataclass(frozen=True)
class Waiting:
    """The flight that a rank waits for.

    Attributes:
        what: its label.
        lane, count: its lane, and its number among the launches there.
        late: the timeout is over.
        patience: seconds without a heartbeat after which a rank is dead.
    """

    what: str
    lane: int
    count: int
    late: bool
    patience: float


@dataclass(frozen=True)
class Record:
    """The latest record of one rank.

    Attributes:
        beats: the number of records that the rank has written.
        launches: by lane.
        how, why: `LEFT`, `RAISED` or `GAVE_UP`, and the reason; "" while the rank is there.
        busy: work that may take long and is excluded from timeouts; "" for none.
        waiting: the flight that it waits for, if one is older than two heartbeats or has failed; else None.
    """

    beats: int
    launches: dict[int, LaunchCount]
    how: str = ""
    why: str = ""
    busy: str = ""
    waiting: Waiting | None = None

    def on(self, lane: int) -> LaunchCount:
        """Return the launches on a lane."""
        return self.launches.get(lane, LaunchCount())

    def as_text(self) -> str:
        """Return the record as it is written."""
        launches = {lane: [each.count, each.what, each.digest] for lane, each in self.launches.items()}
        waiting = None if self.waiting is None else astuple(self.waiting)
        return json.dumps([self.beats, launches, self.how, self.why, self.busy, waiting])

    @classmethod
    def of(cls, text: str | bytes) -> "Record":
        """Return the record that `as_text` has written."""
        beats, launches, how, why, busy, waiting = json.loads(text)
        counts = {int(lane): LaunchCount(*each) for lane, each in launches.items()}
        return cls(beats, counts, how, why, busy, None if waiting is None else Waiting(*waiting))


@dataclass(eq=False)
class History:
    """The launches of this rank on each lane. Thread-safe."""

    before: dict[int, deque[LaunchCount]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, lane: int, what: str, step: int | None) -> LaunchCount:
        """Add a launch, and return the count of launches on its lane."""
        with self.lock:
            known = self.before.setdefault(lane, deque([LaunchCount()], maxlen=REMEMBERED))
            known.append(known[-1].then(what, step))
            return known[-1]

    def latest(self) -> dict[int, LaunchCount]:
        """Return the launches so far, by lane."""
        with self.lock:
            return {lane: known[-1] for lane, known in self.before.items()}

    def at(self, lane: int, count: int) -> LaunchCount | None:
        """Return the launches up to the `count`-th; None if it has not been made, or is too long ago."""
        with self.lock:
            known = self.before.get(lane)
            if not known or not known[0].count <= count <= known[-1].count:
                return None
            return known[count - known[0].count]


def diverged(rank: int, size: int, history: History, records: Mapping[int, Record], sure: bool) -> str:
    """Return a sentence that names the ranks whose launches differ from the others'; "" if none differ.

    The ranks that more than half of all ranks contradict are at fault. Without such a majority the sentence names both
    sides, and only if the caller is `sure` that waiting longer will not show a majority.
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


def differing(count: int, calls: Mapping[int, str]) -> str:
    """Return a sentence that names the ranks whose `count`-th call differs from that of most."""
    alike: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        alike.setdefault(call, []).append(rank)
    many, few, *_ = sorted(alike, key=lambda call: (-len(alike[call]), alike[call]))
    a, b = LaunchCount(count, few), LaunchCount(count, many)
    return _sentence(alike[few], a, alike[many], b, alone=len(alike[few]) < len(alike[many]))


def _sentence(few: list[int], a: LaunchCount, many: list[int], b: LaunchCount, alone: bool) -> str:
    have = "has" if len(few) == 1 and alone else "have"
    head = (
        f"{_ranks(few)} {have} diverged from {_ranks(many)}"
        if alone
        else f"{_ranks(few)} and {_ranks(many)} have diverged"
    )
    late = ", in another step or after other launches" if a.what == b.what else ""
    return (
        f"{head}: as launch {a.count}, {_ranks(few)} made {a.what}, and {_ranks(many)} {b.what}{late}; "
        "all ranks must make the same calls, backward passes and steps in the same order, from the same state"
    )


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
