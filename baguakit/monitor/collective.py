"""A collective, as the monitor sees it; and the launches of a rank, and which of them are in the air."""

import threading
import time
import zlib
from collections import deque
from dataclasses import dataclass, field

from ..lanes import Flight
from .records import LaunchCount

MESSAGES = -1  # their lane
REMEMBERED = 4096  # launches of a lane whose digests a rank can compare with another rank's


@dataclass(eq=False, kw_only=True)
class Collective:
    """Work that all ranks do together on a lane."""

    label: str  # the same on all ranks
    step: int | None = None  # in which it was launched; None if ranks may be at different ones
    flight: Flight = field(default_factory=Flight)  # at first a placeholder
    launched: float = field(default_factory=time.time)
    lane: int = MESSAGES  # its number
    launches: LaunchCount = field(default_factory=LaunchCount)  # on that lane up to this
    failed: bool = False  # its rank does not know yet whose fault it is
    landed: bool = False  # the host, or on a GPU a stream, has waited for it


class Air:
    """The launches of this rank on each lane, and the collectives that have not landed. Thread-safe.

    The latest one on each lane that the host has passed, and a device may still be at work on, is kept as well.
    """

    def __init__(self) -> None:
        self._launches: dict[int, deque[LaunchCount]] = {}  # by lane
        self._held: list[Collective] = []  # in their order; those that have landed are dropped at the next look
        self._passed: dict[int, Collective] = {}  # by lane
        self._first: Collective | None = None
        self.since = 0.0  # the time at which the one that is waited for was launched, or the one before it ended
        self._lock = threading.RLock()

    def launch(self, lane: int, collective: Collective) -> LaunchCount:
        """Add a collective that is put on a lane, and return the launches there up to it."""
        with self._lock:
            known = self._launches.get(lane) or self._launches.setdefault(lane, deque([LaunchCount()], REMEMBERED))
            (number, _, digest), what = known[-1], collective.label
            count = LaunchCount(number + 1, what, zlib.crc32(f"{what}/{collective.step}".encode(), digest))
            known.append(count)
            collective.lane, collective.launches = lane, count
            if self._held and self._held[0].landed:
                self.all()
            self._held.append(collective)
        return count

    def latest(self) -> dict[int, LaunchCount]:
        """Return the launches so far, by lane."""
        with self._lock:
            return {lane: known[-1] for lane, known in self._launches.items()}

    def at(self, lane: int, count: int) -> LaunchCount | None:
        """Return the launches up to the `count`-th; None if it has not been made, or is too long ago."""
        with self._lock:
            known = self._launches.get(lane)
            if not known or not known[0].number <= count <= known[-1].number:
                return None
            return known[count - known[0].number]

    def failed(self, collective: Collective) -> None:
        """Note that a collective has failed, and that its rank does not know yet whose fault it is."""
        with self._lock:
            collective.failed = True
            if collective not in self._held:
                collective.lane = 0
                collective.launches = self._launches.get(0, [LaunchCount()])[-1]
                self._held.append(collective)

    def watch(self, message: Collective) -> None:
        """Keep the latest message between two ranks, for which no other rank has a launch."""
        with self._lock:
            self._passed[MESSAGES] = message

    def all(self) -> list[Collective]:
        """Return all collectives in the air, and note which of the others the host alone has passed."""
        with self._lock:
            self._passed |= {each.lane: each for each in self._held if each.landed and each.flight.on_device}
            self._held = [each for each in self._held if not each.landed]
            return self._held

    def passed(self) -> bool:
        """Return whether there is one that the host has passed, and a device may not have."""
        self.all()
        return bool(self._passed)

    def awaited(self, before: float, passed_before: float) -> tuple[Collective | None, bool]:
        """Return the collective that is waited for, if any, and whether it has failed.

        It is the oldest that has failed, else the oldest that is not done and was launched before a time, else one that
        the host has passed, a device has not done, and was launched before another time.

        Younger flights are not queried: on CUDA that queries an event, which would end a graph capture that training
        has begun meanwhile. Nor is any flight after the first that is not done.
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
