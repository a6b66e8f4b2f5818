"""The runtime of attachments and handles, from start to end."""

import contextlib
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Generic

import torch

from ..comm import FLAT, Comm, abort_all
from ..comm.groups import error_in
from ..lanes import lane
from ..monitor import LEFT, RAISED
from .agreement import agree
from .channels import AGREEMENTS, Channel
from .setup import AnySetup, channel_of, on_mesh
from .start import own_comm, packs_flat, start_monitor, warn_of_shared_cards


@contextlib.contextmanager
def or_abandon(made: Any) -> Iterator[None]:
    """Call `made.abandon(error)` if the body raises: whatever has been begun ends on this rank."""
    try:
        yield
    except BaseException as error:
        made.abandon(error)
        raise


class Runtime(Generic[AnySetup]):
    """The monitor, process groups and lanes of an attachment or a handle on this rank.

    Collective. An error in making it is raised on all ranks, and whatever was made is closed.

    Args:
        kind: of the hooks, for names that ranks agree on.
        make: makes the setup of this rank, and raises if `timeout` is invalid.
        comm, timeout: as the user gave them.
        aborted: called when the groups have been aborted, on any thread.

    Attributes:
        setup: the same on all ranks.
        channels: one for work that lands within a step and, if a rule needs it, one for flights that outlast a step.
        host: a channel that moves CPU tensors, if a rule is free-running; else None.
        over: it has ended.
    """

    def __init__(
        self, kind: str, make: Callable[[], AnySetup], comm: Comm, timeout: Any, aborted: Callable[[], None]
    ) -> None:
        self.comm, self.over, self._aborted = comm, False, aborted
        self.channels: list[Channel] = []
        self.host: Channel | None = None
        self.name, self.monitor = start_monitor(comm, kind, timeout, self._abort, lambda: error_in(self.groups()))
        comm.membership.watch(self.monitor)
        try:
            self.setup = agree(self.monitor, lambda: on_mesh(make(), comm))
        except BaseException:  # which all ranks raise
            self.over = True
            self.monitor.leave(LEFT)
            raise
        device = self.setup.device
        self.monitor.fly_on(device)
        with or_abandon(self):
            for number in range(1 + any(map(channel_of, self.setup.rules))):
                own = self._own_comm(f"{self.name}/{number}", number)
                self.channels.append(Channel(number, lane(device), own, self.monitor))
            if not comm.membership.changes:
                warn_of_shared_cards(self.channels[0], list(filter(packs_flat, self.setup.rules)))
            if any(rule.window == "free_running" for rule in self.setup.rules):
                flat, cpu = Comm(comm.group), torch.device("cpu")
                own = own_comm(flat, f"{self.name}/host", self.setup.timeout, cpu, self.monitor, {FLAT})
                self.host = Channel(AGREEMENTS, lane(cpu), own, self.monitor)

    def _own_comm(self, name: str, channel: int, flows: int | None = None) -> Comm:
        setup = self.setup
        return own_comm(self.comm, name, setup.timeout, setup.device, self.monitor, setup.groups(channel), flows)

    def use_flows(self, flows: int) -> None:
        """Replace the groups of every channel by groups of `flows` flows. Collective."""
        before = self.channels
        unique = before[0].together("other flows", lambda comm: comm.broadcast_object(uuid.uuid4().hex))
        self.channels = [
            Channel(c.number, c.lane, self._own_comm(f"{self.name}/{unique}/{c.number}", c.number, flows), self.monitor)
            for c in before
        ]
        for channel in before:
            channel.comm.close()

    # The end

    def finish(self, drain: Callable[[], None]) -> None:
        """Call `drain`, which waits for what is in the air, and close. Idempotent."""
        if self.over:
            return
        with or_abandon(self):
            drain()
            for channel in self.channels:  # the host waits while a lost rank is still noticed
                self.monitor.wait_until(channel.lane.idle)
        self.over = True
        self.monitor.leave(LEFT)
        self._close(wait=True)

    def abandon(self, error: BaseException | None) -> None:
        """End without waiting for any rank, and tell the others why, or that this one has left. Idempotent."""
        if self.over:
            return
        self.over = True
        self.monitor.leave(*((LEFT, "") if error is None else (RAISED, f"{type(error).__name__}: {error}")))
        self._abort()
        self._close(wait=False)

    def _abort(self) -> None:
        abort_all(self.groups())
        self._aborted()

    def _close(self, wait: bool) -> None:
        for channel in self._all_channels():
            channel.lane.close(wait)
        for channel in self._all_channels() if self.comm.size > 1 else ():
            channel.comm.close()

    def groups(self) -> list[Any]:
        """Return the process groups that were made here: none with one rank, which uses the group of the user."""
        return [group for each in self._all_channels() for group in each.comm.groups() if self.comm.size > 1]

    def _all_channels(self) -> list[Channel]:
        return [*self.channels, *([self.host] if self.host else [])]
