"""A collective, as the monitor sees it, and those that are in the air."""

import threading
import time
from dataclasses import dataclass, field

from ..lanes import Flight
from .records import LaunchCount

MESSAGES = -1  # their lane


class Unlaunched(Flight):
    """A placeholder for a flight that is about to be launched."""

    def done(self) -> bool:
        return False


@dataclass(eq=False, kw_only=True)
class Collective:
    """Work that all ranks do together on a lane.

    Attributes:
        label: the work in words, the same on all ranks.
        step: the optimizer step in which it was launched; None if ranks may be at different ones.
        flight: the work under way.
        launched: the time of its launch, in seconds of `time.time`.
    """

    label: str
    step: int | None = None
    flight: Flight = field(default_factory=Unlaunched)
    launched: float = field(default_factory=time.time)

    def end(self, error: Exception) -> None:
        """End the flight with an error."""
        self.flight.fail(error)


@dataclass(frozen=True, eq=False)
class Airborne:
    """A collective in the air: the lane it flies on, and the launches there up to it."""

    collective: Collective
    lane: int
    launches: LaunchCount


class Air:
    """The collectives that have been launched and not waited for. Thread-safe.

    The latest one on each lane that the host has passed, and a device may still be at work on, is kept as well.
    """

    def __init__(self) -> None:
        self._held: dict[Collective, Airborne] = {}
        self._passed: dict[int, Airborne] = {}  # by lane
        self._failed: set[Collective] = set()
        self._first: Collective | None = None
        self.since = 0.0  # the time at which the one that is waited for was launched, or the one before it ended
        self._lock = threading.Lock()

    def add(self, flying: Airborne) -> None:
        """Add a collective that is put on a lane."""
        with self._lock:
            self._held[flying.collective] = flying

    def failed(self, flying: Airborne) -> None:
        """Note that a collective has failed, and that its rank does not know yet whose fault it is."""
        with self._lock:
            self._held.setdefault(flying.collective, flying)
            self._failed.add(flying.collective)

    def find(self, collective: Collective) -> Airborne | None:
        """Return a collective as it was added; None if it was not."""
        with self._lock:
            return self._held.get(collective)

    def land(self, collective: Collective) -> None:
        """Remove a collective for which the host, or on a GPU a stream, has waited."""
        with self._lock:
            flying = self._held.pop(collective, None)
            if flying is not None and collective.flight.on_device:
                self._passed[flying.lane] = flying
            self._failed.discard(collective)

    def watch(self, message: Collective) -> None:
        """Keep the latest message between two ranks, for which no other rank has a launch."""
        with self._lock:
            self._passed[MESSAGES] = Airborne(message, MESSAGES, LaunchCount())

    def all(self) -> list[Collective]:
        """Return all collectives in the air."""
        with self._lock:
            return list(self._held)

    def passed(self) -> bool:
        """Return whether there is one that the host has passed, and a device may not have."""
        return bool(self._passed)

    def awaited(self, before: float, passed_before: float) -> tuple[Airborne | None, bool]:
        """Return the collective that is waited for, if any, and whether it has failed.

        It is the oldest that has failed, else the oldest that is not done and was launched before a time, else one that
        the host has passed, a device has not done, and was launched before another time.

        Younger flights are not queried: on CUDA that queries an event, which would end a graph capture that training
        has begun meanwhile. Nor is any flight after the first that is not done.
        """
        with self._lock:
            if self._failed:
                failed = min(self._failed, key=lambda each: each.launched)
                self.since = failed.launched
                return self._held[failed], True
            old = sorted((each for each in self._held if each.launched < before), key=lambda each: each.launched)
            first = next((each for each in old if not (each.flight.done() or each.flight.held)), None)
            last, self._first = self._first, first
            if first is not None:
                if first is not last:
                    self.since = first.launched if last is None else max(first.launched, time.time())
                return self._held[first], False
            for lane, flying in list(self._passed.items()):
                if flying.collective.launched < passed_before:
                    if not flying.collective.flight.done():
                        self.since = flying.collective.launched
                        return flying, False
                    del self._passed[lane]
            return None, False
