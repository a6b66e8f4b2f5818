"""Errands: work that all ranks do together on a lane, besides the flights of rules: to the monitor, one more trip."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..comm import Comm
from ..lanes import Flight, Lane
from .monitor import Monitor

if TYPE_CHECKING:
    from .routes import Track


class Unlaunched(Flight):
    """Stands for a flight that is about to be launched."""

    def done(self) -> bool:
        return False


@dataclass(eq=False)
class Errand:
    """Work on a lane that all ranks do."""

    what: str
    lane: int  # its number
    monitor: Monitor
    flight: Flight = field(default_factory=Unlaunched)
    launched: float = field(default_factory=time.time)
    step: int | None = None

    def __str__(self) -> str:
        return self.what


def begin_on(
    lane: Lane, number: int, what: str, work: Callable[[], Any], monitor: Monitor, meet: bool = False
) -> Errand:
    """Put `work` on a lane. With `meet`, first wait there until all ranks have come to the same call.

    A call that a user makes, and may make on some ranks only, has to meet the others before it touches a group, where
    its messages would meet those of another flight.
    """
    monitor.check()
    errand = Errand(what, number, monitor)
    launch = monitor.launched(number, errand)

    def met() -> Any:
        monitor.meet(number, launch)
        return work()

    errand.flight = lane.run(met if meet else work, what)
    return errand


def begin(what: str, work: Callable[[Comm], Any], track: "Track", monitor: Monitor, meet: bool = False) -> Errand:
    """Put `work(comm)` on the lane of a track."""
    return begin_on(track.lane, track.number, what, lambda: work(track.comm), monitor, meet)


def end(errand: Errand) -> Any:
    """Wait for an errand and return its result; who is missing is named."""
    try:
        return errand.flight.result()
    except Exception as error:
        errand.monitor.reraise(error, errand)
    finally:
        errand.monitor.landed(errand)


def together(what: str, work: Callable[[Comm], Any], track: "Track", monitor: Monitor, meet: bool = False) -> Any:
    """Do `work(comm)` on a lane, as all ranks do, and wait for it; who is missing is named."""
    return end(begin(what, work, track, monitor, meet))
