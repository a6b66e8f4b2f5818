"""Channels: lanes and the process groups that only the work on them uses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...comm import Comm
from ...lanes import Lane
from ..monitor import Collective, Monitor


@dataclass(frozen=True, eq=False)
class Channel:
    """A lane, and the process groups that only the work on it uses.

    Attributes:
        number: tells channels apart, for the monitor.
    """

    number: int
    lane: Lane
    comm: Comm
    monitor: Monitor

    def begin(self, label: str, work: Callable[[Comm], Any], meet: bool = False) -> Collective:
        """Put `work(comm)` on the lane, on all ranks.

        Args:
            label: the work in words.
            work: called on the lane.
            meet: wait on the lane until all ranks have made the same call. A call of a user, who may make it on some
                ranks only, needs that: else its messages would meet those of another flight.
        """
        self.monitor.check()
        collective = Collective(label=label)
        launches = self.monitor.launched(self.number, collective)

        def run() -> Any:
            self.monitor.check()  # if earlier flights were dropped, the messages of this one would meet theirs
            if meet:
                self.monitor.meet(self.number, launches)
            return work(self.comm)

        collective.flight = self.lane.run(run, label)
        return collective

    def together(self, label: str, work: Callable[[Comm], Any], meet: bool = False) -> Any:
        """Do `work(comm)` on the lane, on all ranks, and return its result.

        Raises:
            PeerError: names the rank at fault, if the network fails or a rank does not come.
        """
        return self.monitor.wait_for(self.begin(label, work, meet))
