"""Schedules of rules: the values of `every=`, `start=` and `stop=` that are no numbers."""

from collections.abc import Callable
from typing import Protocol

from .comm import Comm


class Interval(Protocol):
    """An interval that is decided during training: a value of `every=`.

    All ranks exchange as often, and wait in an exchange for the last rank that comes to it. So the answers must be the
    same on all ranks, or lead to as many exchanges. Ranks agree without waiting on what each of them measures by a
    flight of the object's own, launched in one step and read in a later one (`bk.primitives.launch`, over a group of
    its own). `att.state_dict()` does not hold the object: it saves itself what a resumed training needs.
    """

    def due(self, step: int, comm: Comm) -> bool:
        """Return True to exchange in this step.

        Asked once in each step in which the rule acts and no exchange of it is in the air. `comm.round` is the number
        of exchanges so far.
        """
        ...


Every = int | Callable[[int], int] | Interval
Bound = int | Callable[[int], bool]
