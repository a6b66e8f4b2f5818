"""The clock of an attachment."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum


class Turn(IntEnum):
    """The next collective of a rank: a backward, the start of a step, or the end of a step."""

    BACKWARD, BEGIN, END = 1, 2, 3


def announce_nothing(what: int) -> None:
    """Do nothing: outside `join()` no rank waits for announcements."""


@dataclass
class Clock:
    """The step of an attachment, and the modes that its user has entered.

    Attributes:
        step: optimizer steps made since the attachment was made.
        synchronising: false inside `no_sync()`, where gradients are only accumulated.
        announce: inside `join()`, tells the ranks that have run out of batches the next collective, before it is done.
        joined: the call of `join()` under way, or "".
    """

    step: int = 0
    synchronising: bool = True
    announce: Callable[[int], None] = announce_nothing
    joined: str = ""

    def outside(self, what: str) -> None:
        """Raise a RuntimeError inside `join()`, where a rank that has run out of batches would not make this call."""
        if self.joined:
            raise RuntimeError(
                f"all ranks make {what} together, and inside att.join() one that has run out of batches would not; "
                "call it before or after"
            )
