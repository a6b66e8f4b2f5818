"""The time of an attachment."""

from collections.abc import Callable
from dataclasses import dataclass

BACKWARD, BEGIN, END = 1, 2, 3  # what a rank is about to do: a backward, the start of a step, the end of a step


def unasked(what: int) -> None:
    """Outside `join()` nobody is asked."""


@dataclass
class Clock:
    """The state that hooks share.

    Attributes:
        step: optimizer steps made since the attachment was made.
        synchronising: false inside `no_sync()`, where gradients are only accumulated.
        ask: inside `join()`, tells the ranks that have run out of batches, before it is done, what comes.
        joined: the call of `join()` under way, or "".
    """

    step: int = 0
    synchronising: bool = True
    ask: Callable[[int], None] = unasked
    joined: str = ""

    def outside(self, what: str) -> None:
        """Raise a RuntimeError inside `join()`, where a rank that has run out of batches would not make this call."""
        if self.joined:
            raise RuntimeError(
                f"all ranks make {what} together, and inside att.join() one that has run out of batches would not; "
                "call it before or after"
            )
