"""The time of an attachment."""

from dataclasses import dataclass


@dataclass
class Clock:
    """What hooks read and write.

    Attributes:
        step: optimizer steps made since the attachment was made.
        synchronising: false inside `no_sync()`, where gradients are only accumulated.
    """

    step: int = 0
    synchronising: bool = True
