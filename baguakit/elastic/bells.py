"""Bells: how a rank tells all others of its round at once that it is over, or will be.

Each rank waits for its own keys in the store, on a thread and a connection of its own: it asks once, and the store
answers when the key is there. A round has at most one pause and one end, so that two keys for each rank are enough.
"""

import contextlib
import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from .meeting import Round

PAUSE, BROKEN = "pause", "broken"
FOREVER = timedelta(days=365)


class Bells:
    """The bells of one round on one rank.

    Args:
        round: the round.
        heard: called on a thread with the round, `PAUSE` or `BROKEN`, and the words of the rank that rang.
    """

    def __init__(self, round: Round, heard: Callable[[Round, str, Any], None]) -> None:
        self.round, self.heard, self.over = round, heard, False
        self._thread = threading.Thread(target=self._listen, name="baguakit bells", daemon=True)
        self._thread.start()

    def pause(self, plan: Any) -> None:
        """Ask all to end the round after a step. Only the first plan of a round counts."""
        text = json.dumps([PAUSE, plan])
        with contextlib.suppress(RuntimeError):  # the store is gone, which breaks the round as well
            if self.round.store.compare_set("pause", "", text) == text.encode():
                ring(self.round, text, 0)

    @staticmethod
    def broken_by(round: Round, why: str) -> None:
        """Tell all ranks of a round that it is over."""
        with contextlib.suppress(RuntimeError):
            round.store.set("over", why)
            ring(round, json.dumps([BROKEN, why]), 0, 1)

    def end(self) -> None:
        """Wake and end the thread of this rank."""
        self.over = True
        with contextlib.suppress(RuntimeError):
            rank = self.round.rank
            self.round.store.multi_set([key(rank, 0), key(rank, 1)], [json.dumps([BROKEN, ""])] * 2)
            self._thread.join(1.0)

    def _listen(self) -> None:
        try:
            store = self.round.store.clone()
            for time in (0, 1):
                store.wait([key(self.round.rank, time)], FOREVER)
                kind, said = json.loads(store.get(key(self.round.rank, time)))
                if self.over:
                    return
                self.heard(self.round, kind, said)
                if kind == BROKEN:
                    return
        except RuntimeError:  # the store is gone, which the pulse notices as well
            return


def key(rank: int, time: int) -> str:
    """Return the key of the bell of a rank: 0 for the first, 1 for one after a pause."""
    return f"bell/{rank}/{time}"


def ring(round: Round, text: str, *times: int) -> None:
    """Ring the bells of all ranks of a round."""
    keys = [key(rank, time) for rank in range(round.size) for time in times]
    round.store.multi_set(keys, [text] * len(keys))
