"""A store that may not answer: the search of a process for its next round, and what it tells the others."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

SILENT = 2.0  # seconds without an answer after which the store is not reached: it is asked many times in a second
TOLD = 1.0  # seconds that the store has to take what it is told


class Search:
    """A search for a round.

    Args:
        where: "host:port" of the store.

    Attributes:
        over: nobody waits for it any more.
        failed: why the store cannot be reached; "" while it can.
        meeting: the latest.
    """

    def __init__(self, where: str) -> None:
        self.where, self.failed, self.over = where, "", False
        self.meeting: Any = None
        self._looked = time.monotonic()

    def looked(self) -> None:
        """Note that the store has answered, or failed.

        Raises:
            TimeoutError: nobody waits for a round any more.
        """
        self._looked = time.monotonic()
        if self.over:
            raise TimeoutError

    def is_silent(self) -> bool:
        """Return whether the store does not answer."""
        return time.monotonic() - self._looked > SILENT

    def line(self, least: int) -> str:
        """Return a line on what this process waits for."""
        if why := self._no_store():
            return why
        if self.meeting is not None and self.meeting.cut_off:
            return f"{self.meeting.me.name} cannot reach {self.meeting.cut_off}, and waits until it can"
        return f"waiting for at least {least} ranks at {self.where}"

    def failure(self, least: int, patience: float) -> str:
        """Return the sentence on a search that has taken all the patience."""
        if why := self._no_store():
            return why
        if self.meeting is not None and self.meeting.cut_off:
            return (
                f"{self.meeting.me.name} is left out: within {patience:g} s it could not reach {self.meeting.cut_off}; "
                "check the network between them, and GLOO_SOCKET_IFNAME"
            )
        return f"no group of at least {least} ranks has formed at {self.where} within {patience:g} s"

    def _no_store(self) -> str:
        silent = f"no answer for {time.monotonic() - self._looked:.1f} s" if self.is_silent() else ""
        why = self.failed or silent
        return why and f"the store at {self.where} cannot be reached: {why}"


def tell(request: Callable[[], Any]) -> None:
    """Make a request to the store; without a store there is nobody to tell, and one that hangs is not waited for."""

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            request()

    asking = threading.Thread(target=ask, name="baguakit tell", daemon=True)
    asking.start()
    asking.join(TOLD)
