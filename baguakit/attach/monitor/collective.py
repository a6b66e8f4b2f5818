"""A collective, as the monitor sees it."""

import time
from dataclasses import dataclass, field

from ...lanes import Flight


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

    def end(self, error: Exception | None) -> None:
        """End the flight with an error; None ends nothing."""
        if error is not None:
            self.flight.fail(error)
