"""The end of a process with attachments: it tells the other ranks, and ends the threads of the monitors.

A thread that returns from a call of torch while the interpreter ends aborts the process. The store may end with rank 0,
and the others read there why a rank has left: so rank 0 waits a moment for the others to leave first.
"""

import atexit
import os
import sys
import time
import weakref

from .monitor import Monitor
from .records import LEFT, RAISED

_monitors: "weakref.WeakKeyDictionary[Monitor, int]" = weakref.WeakKeyDictionary()  # with the process of each


def end_with_process(monitor: Monitor) -> None:
    """End a monitor with this process, if it has not ended by then."""
    _monitors[monitor] = os.getpid()


@atexit.register
def end_all() -> None:
    """End all monitors of this process."""
    monitors = [monitor for monitor, process in list(_monitors.items()) if process == os.getpid()]
    error = getattr(sys, "last_value", None)  # it ends for that
    for monitor in monitors:
        if not monitor.left:
            how, why = (LEFT, "") if error is None else (RAISED, f"{type(error).__name__}: {error}")
            monitor.leave(how, why)
    for monitor in monitors:
        until = time.monotonic() + monitor.silence
        while monitor.rank == 0 and not monitor.alone() and time.monotonic() < until:
            time.sleep(monitor.beat / 4)
