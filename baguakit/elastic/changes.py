"""A change of the group, as callbacks are told of it, and the end of a rank that has left."""

from dataclasses import dataclass


class Left(SystemExit):
    """This rank has left the group: by `Attachment.leave`, or by SIGTERM. Uncaught, it ends the process with status 0.

    Like any SystemExit, `except Exception` does not catch it.
    """

    __module__ = "baguakit.elastic"  # tracebacks show the public name

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Change:
    """A change of the group.

    Attributes:
        rank, ranks: of this process, and in all, from now on.
        before: for each rank, its rank before the change; None for one that has joined.
        lost: the names of those that are gone: host and process number.
        steps: the optimizer steps that were made in the group as it was before.
        step: the number of optimizer steps made, where all go on.
        seconds: from the end of the last step to now, on this rank.
        why: a sentence.
    """

    rank: int
    ranks: int
    before: tuple[int | None, ...]
    lost: tuple[str, ...]
    steps: int
    step: int
    seconds: float
    why: str
