"""A thread as a lane."""

import atexit
import contextlib
import ctypes
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .base import Flight, FlightTimes, Lane, in_profile
from .temporaries import keep

TIME_TO_END = 2.0  # seconds that threads have to end before the interpreter does


class CpuLane(Lane):
    """One thread, started with the first work. It is a daemon: a stuck peer must not keep the process alive."""

    def __init__(self, name: str = "baguakit lane") -> None:
        self._name = name
        self._work: queue.SimpleQueue[CpuFlight | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Any], name: str = "") -> "CpuFlight":
        with in_profile("launch", name):
            flight = CpuFlight(work, name)
            self._work.put(flight)
            if self._thread is None:
                self._thread = threading.Thread(target=_fly_all, args=(self._work,), name=self._name, daemon=True)
                self._thread.start()
                _threads[self._thread] = self._work
        return flight

    def here(self) -> bool:
        return threading.current_thread() is self._thread

    def rest(self, seconds: float) -> None:
        self.run(lambda: None).wait(seconds)

    def close(self, wait: bool = True) -> None:
        if self._thread is not None:
            self._work.put(None)
            if wait:
                self._thread.join()
            self._thread = None


_threads: "weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[CpuFlight | None]]" = (
    weakref.WeakKeyDictionary()
)


@atexit.register
def end_threads() -> None:
    """End the threads of all lanes: one that returns from torch after the interpreter has ended aborts the process."""
    until, threads = time.monotonic() + TIME_TO_END, list(_threads.items())
    for _, work in threads:
        with contextlib.suppress(queue.Empty):
            while True:
                work.get_nowait()
        work.put(None)
    for thread, _ in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread, _ in threads):
        pause_at_terminate()


def pause_at_terminate() -> None:
    """Let a thread pause where C++ would abort the process.

    The thread still waits in torch, for a peer that does not answer. When it returns, Python before 3.14 ends it, and
    C++ treats the end of a thread within its functions as an error.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C++ library: it aborts as before
            set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
            set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


def _fly_all(work: "queue.SimpleQueue[CpuFlight | None]") -> None:
    keep()
    with torch.no_grad():
        while (flight := work.get()) is not None:
            flight.fly()
            del flight  # the thread waits for work without holding on to the last result


class CpuFlight(Flight):
    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self._work: Callable[[], Any] | None = work
        self._name = name
        self._lock, self._over = threading.Lock(), False
        self._gate = threading.Lock()  # held until it is over: an Event takes several Python calls to be set
        self._gate.acquire()
        self._launched = self._began = self._ended = time.perf_counter()
        self._waits: list[tuple[float, float]] = []

    def fly(self) -> None:
        """Do the work; on the lane's thread."""
        if self._over or self._work is None:
            return
        self._began = time.perf_counter()
        try:
            with in_profile("", self._name):
                value = self._work()
            self._finish(value=value)
        except BaseException as error:
            self._finish(error=error)

    def _finish(self, value: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            if not self._over:
                self._value, self._error, self._work = value, error, None
                self._ended, self._over = time.perf_counter(), True
                self._gate.release()

    def fail(self, error: BaseException) -> None:
        self._finish(error=error)

    def done(self) -> bool:
        return self._over

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most so many seconds. Return True if the work has ended."""
        if passed := self._gate.acquire(timeout=seconds):
            self._gate.release()
        return passed

    def result(self) -> Any:
        before = time.perf_counter()
        with in_profile("wait for", self._name), self._gate:
            pass
        self._waits.append((before, time.perf_counter()))
        if self._error is not None:
            raise self._error
        return self._value

    def times(self) -> FlightTimes:
        return FlightTimes(self._launched, self._began, self._ended, tuple(self._waits))
