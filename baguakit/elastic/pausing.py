"""Pauses: all ranks end a round after the same step, and none loses one.

    until  =  1 + max_r at_r        rounded up to a multiple of `every`

where at_r is the number of steps that rank r had made when it heard of the pause. Each rank says its number from the
thread that hears, so that none waits for another's step, and no rank passes the end of the step under way before it
knows `until`.
"""

import json
import time
from collections.abc import Callable
from typing import Any

from .members import Round
from .rendezvous import POLL

SAID = 5.0  # seconds that the ranks have to say where they are


class Pause:
    """The pause of a round; only the first plan of a round counts.

    Args:
        round: to be ended.
        step: returns the step of this rank; -1 if no rank waits for another, so that each may stop at once.
    """

    def __init__(self, round: Round, step: Callable[[], int]) -> None:
        self.round, self.step = round, step
        self.plan: dict[str, Any] = {}  # "every", and "why"; empty while there is none
        self._until: int | None = None

    def ask(self, every: int, why: str) -> None:
        """Ask all ranks to end the round after a step whose number is a multiple of `every`."""
        self.round.store.compare_set("plan", "", json.dumps({"every": every, "why": why}))
        self.round.store.set("told", "")

    def heard(self) -> None:
        """Tell the others where this rank is: on the thread that hears of the plan."""
        self.plan = json.loads(self.round.store.get("plan"))  # first: a step that ends now waits for what all say
        self.round.store.set(f"at/{self.round.rank}", str(self.step()))

    def due(self, step: int) -> bool:
        """Return whether the round ends now: this rank has made so many steps.

        A rank that does not say where it is has been lost, which the first message to it shows.
        """
        if not self.plan:
            return False
        store, until = self.round.store, time.monotonic() + SAID
        keys = [f"at/{rank}" for rank in range(self.round.size)]
        while self._until is None:
            if store.check(keys):
                every, top = self.plan["every"], max(map(int, store.multi_get(keys)))
                self._until = -(-(top + 1) // every) * every
            elif time.monotonic() > until or store.check(["over"]):
                return False
            else:
                time.sleep(POLL[0])
        return step < 0 or step >= self._until
