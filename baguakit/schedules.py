"""Schedules of rules: values of `every=`, `start=` and `stop=` that are not numbers."""

from collections.abc import Callable
from typing import Protocol

from .arguments import Natural
from .comm import Comm


class Interval(Protocol):
    """An interval that is decided during training: a value of `every=`.

    All ranks must make the same number of exchanges, and an exchange waits for the last rank. So the answers must be
    the same on all ranks, or lead to equally many exchanges. To combine measurements of all ranks without waiting, the
    object launches a flight in one step and reads it in a later step (`bk.primitives.launch`, over a separate group).
    `att.state_dict()` does not contain the object: the user saves the data that a resumed training needs.
    """

    def due(self, step: int, comm: Comm) -> bool:
        """Return True to exchange in this step.

        It is called once in each step in which the rule acts and has no exchange in flight. `comm.round` is the number
        of exchanges so far.
        """
        ...


Every = int | Callable[[int], int] | Interval
Bound = Natural | Callable[[int], bool]
