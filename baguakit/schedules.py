"""Schedules of rules: values of `every=`, `start=` and `stop=` that are not numbers."""

from collections.abc import Callable
from typing import Protocol

from .arguments import Natural
from .comm import Comm


class Interval(Protocol):
    """An object that tells in each step of training whether to exchange: a value of `every=`.

    All ranks must make the same number of exchanges, because an exchange waits for the last rank. So `due` must return
    the same on all ranks, or return True equally often. To combine measurements of all ranks without waiting, launch a
    flight in one step and read its result in a later step (`bk.primitives.launch`, with a separate group).
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
