"""The record of each rank in the store, which the other ranks read.

A record holds a heartbeat, the flight that the rank waits for, and for each lane the number of launches, the label of
the latest, and a digest of all of them in order. Two ranks have parted if their digests differ after equally many
launches, even if all messages arrived.
"""

import json
import threading
import zlib
from collections import deque
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
