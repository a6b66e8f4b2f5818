"""Pauses: all ranks end a round after the same step, and none loses one.

    until  =  1 + max_r at_r        rounded up to a multiple of `every`

where at_r is the number of steps that rank r had made when it heard of the pause. Each rank says its number from the
thread that hears, so that none waits for another's step, and no rank passes the end of the step under way before it
knows `until`.
"""

import threading
from collections.abc import Callable
from typing import Any

from .meeting import Round, waited

SAID = 5.0  # seconds that the ranks have to say where they are


class Pause:
    """The pause of a round.

    Args:
        round: to be ended.
        step: returns the step of this rank; -1 if no rank waits for another, so that each may stop at once.
    """

    def __init__(self, round: Round, step: Callable[[], int]) -> None:
        self.round, self.step = round, step
        self._lock = threading.Lock()
        self._plan: dict[str, Any] | None = None
        self._until: int | None = None

    @property
    def why(self) -> str:
        """Return the reason of the pause."""
        return str(self._plan["why"]) if self._plan else ""

    def plan(self, plan: dict[str, Any]) -> None:
        """Plan the pause: on the thread that hears of it."""
        with self._lock:
            self._plan = plan
            self.round.store.set(f"at/{self.round.rank}", str(self.step()))

    def due(self, step: int) -> bool:
        """Return whether the round ends now: this rank has made so many steps.

        A rank that does not say where it is has been lost, which the first message to it shows.
        """
        with self._lock:
            if self._plan is None:
                return False
        if self._until is None:
            keys = [f"at/{rank}" for rank in range(self.round.size)]
            if not waited(self.round.store, keys, SAID):
                return False
            every, top = self._plan["every"], max(map(int, self.round.store.multi_get(keys)))
            self._until = -(-(top + 1) // every) * every
        return step < 0 or step >= self._until
