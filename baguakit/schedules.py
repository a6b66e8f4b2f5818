"""Schedules of rules: the values of `every=`, `start=` and `stop=` that are no numbers."""

from bisect import bisect_left
from collections.abc import Callable
from math import inf
from typing import Protocol

from .arguments import truth
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


class FirstStep:
    """The first step in which a function is true: `start` or `stop` of a rule, by its `name`."""

    def __init__(self, name: str, function: Callable[[int], bool]) -> None:
        self.name, self.function = name, function
        self.asked, self.first = 0, inf  # the steps asked of so far; the one found

    def until(self, step: int) -> float:
        """Return the first step, up to this one, in which the function is true; inf if it is in none of them."""
        while self.asked <= step and self.first == inf:
            if truth(f"{self.name}({self.asked})", self.function(self.asked)):
                self.first = self.asked
            self.asked += 1
        return self.first


class Rounds:
    """Rounds one after another, whose lengths a function `every` tells from the steps in which they begin.

    Args:
        begin: the first step of the first round.
        every: the function.
        check: raises if there can be no rounds of a length, given its name and the length.
    """

    def __init__(self, begin: int, every: Callable[[int], int], check: Callable[[str, int], None]) -> None:
        self.begin, self.every, self.check = begin, every, check
        self.ends: list[int] = []  # the last steps of the rounds asked for, in order

    def end(self, step: int) -> int:
        """Return the last step of the round that has this step."""
        while not self.ends or self.ends[-1] < step:
            self._next()
        return self.ends[bisect_left(self.ends, step)]

    def first_ends(self, count: int) -> list[int]:
        """Return the last steps of the first rounds."""
        while len(self.ends) < count:
            self._next()
        return self.ends[:count]

    def _next(self) -> None:
        begin = self.ends[-1] + 1 if self.ends else self.begin
        length = self.every(begin)
        self.check(f"every({begin})", length)
        self.ends.append(begin + length - 1)
