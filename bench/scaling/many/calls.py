"""The number of Python calls: what a step costs the host, whatever else the machine does."""

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# The calls of these depend on time, or are those of a group that only counts.
UNCOUNTED = (
    *("threading", "queue", "selectors", "weakref", "_weakrefset", "bench.scaling.many.group"),
    "baguakit.monitor.records",  # a launch drops what has landed by then
)


class Calls:
    """A counter of the Python calls of this thread, and of the threads that are started while it is installed.

    Attributes:
        by_thread: the number of calls by the name of the thread.
    """

    def __init__(self) -> None:
        self.by_thread: Counter[str] = Counter()
        self._counts = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._counts and event == "call" and frame.f_globals.get("__name__") not in UNCOUNTED:
            self.by_thread[threading.current_thread().name] += 1

    @contextmanager
    def installed(self) -> Iterator["Calls"]:
        """Watch this thread and those that start in this block."""
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def of(self, work: Callable[[], Any], but: str = "monitor") -> int:
        """Return the calls made while `work()` runs, on all watched threads but those whose name contains `but`."""
        gc.disable()  # the end of an object may make calls
        before, self._counts = self.by_thread.copy(), True
        try:
            work()
        finally:
            self._counts = False
            gc.enable()
        return sum(n for name, n in (self.by_thread - before).items() if but not in name)


def python_calls(work: Callable[[], Any]) -> int:
    """Return the number of Python calls on this thread while `work()` runs."""
    with Calls().installed() as calls:
        return calls.of(work)
