"""Channels: lanes and the process groups that only the work on them uses."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..comm import Comm
from ..lanes import Lane
from ..monitor import Collective, Monitor, PeerError

AGREEMENTS = 2  # the number of the channel of agreements: the channels of flights come first


@dataclass(frozen=True, eq=False)
class Channel:
    """A lane, and the process groups that only the work on it uses."""

    number: int  # tells channels apart, for the monitor
    lane: Lane
    comm: Comm
    monitor: Monitor
    failed: list[str] = field(default_factory=list)  # what has failed here

    def check(self) -> None:
        """Raise, on the lane, if earlier work was dropped or has failed: messages would meet those it still lacks."""
        self.monitor.check()
        if self.failed:
            raise PeerError(self.failed[0])

    def note(self, label: str, error: Exception) -> None:
        """Note that work has failed. One rank alone may go on: its messages meet nobody's."""
        if self.comm.size > 1:  # in words: the error holds the frames in which it was raised, and they hold groups
            self.failed.append(f"{label} failed on rank {self.comm.rank}: {type(error).__name__}: {error}")

    def begin(self, label: str, work: Callable[[Comm], Any], meet: bool = False) -> Collective:
        """Put `work(comm)` on the lane, on all ranks; `label` is the work in words.

        With `meet`, wait on the lane until all ranks have made the same call. A call of a user, who may make it on some
        ranks only, needs that: else its messages would be taken for messages of another flight.
        """
        self.monitor.check()
        collective = Collective(label=label)
        launches = self.monitor.launched(self.number, collective)

        def run() -> Any:
            self.check()
            if meet:
                self.monitor.barrier(self.number, launches)
            try:
                return work(self.comm)
            except Exception as error:
                self.note(label, error)
                raise

        collective.flight = self.lane.run(run, label)
        return collective

    def together(self, label: str, work: Callable[[Comm], Any], meet: bool = False) -> Any:
        """Do `work(comm)` on the lane, on all ranks, and return its result. With `meet` the host waits for it.

        Raises:
            PeerError: names the rank at fault, if the network fails or a rank does not come.
        """
        collective = self.begin(label, work, meet)
        if meet and collective.flight.on_device:  # a call of a user, who may save what it brings
            self.monitor.wait_until(collective.flight.done)
        return self.monitor.wait_for(collective)
