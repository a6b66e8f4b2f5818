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

PAUSE, BROKEN = "pause", "broken"
FOREVER = timedelta(days=365)


class Bells:
    """The bells of one round on one rank.

    Args:
        store: the part of the key-value store that only this round uses.
        rank, size: in this round.
        heard: called on a thread with (`PAUSE` or `BROKEN`, and what the rank that rang says).
    """

    def __init__(self, store: Any, rank: int, size: int, heard: Callable[[str, Any], None]) -> None:
        self.store, self.rank, self.size, self.heard = store, rank, size, heard
        self.over = False
        self._thread = threading.Thread(target=self._listen, name="baguakit bells", daemon=True)
        self._thread.start()

    def pause(self, plan: Any) -> None:
        """Ask all to end the round after a step. Only the first plan of a round counts."""
        text = json.dumps([PAUSE, plan])
        with contextlib.suppress(RuntimeError):  # the store is gone, which breaks the round as well
            if self.store.compare_set("pause", "", text) == text.encode():
                self._ring(0, text)

    def broken(self, why: str) -> None:
        """Tell all that the round is over."""
        ring_broken(self.store, self.size, why)

    def end(self) -> None:
        """Wake and end the thread of this rank."""
        self.over = True
        with contextlib.suppress(RuntimeError):
            self.store.multi_set([key(self.rank, 0), key(self.rank, 1)], [json.dumps([BROKEN, ""])] * 2)
            self._thread.join(1.0)

    def _ring(self, time: int, text: str) -> None:
        self.store.multi_set([key(rank, time) for rank in range(self.size)], [text] * self.size)

    def _listen(self) -> None:
        try:
            store = self.store.clone()
            for time in (0, 1):
                store.wait([key(self.rank, time)], FOREVER)
                kind, said = json.loads(store.get(key(self.rank, time)))
                if self.over:
                    return
                self.heard(kind, said)
                if kind == BROKEN:
                    return
        except RuntimeError as error:
            if not self.over:
                self.heard(BROKEN, f"the store is gone: {str(error).splitlines()[0]}")


def key(rank: int, time: int) -> str:
    """Return the key of the bell of a rank: 0 for the first, 1 for one after a pause."""
    return f"bell/{rank}/{time}"


def ring_broken(store: Any, size: int, why: str) -> None:
    """Tell all ranks of a round that it is over."""
    keys = [key(rank, time) for rank in range(size) for time in (0, 1)]
    with contextlib.suppress(RuntimeError):
        store.multi_set(keys, [json.dumps([BROKEN, why])] * len(keys))
