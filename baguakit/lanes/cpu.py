"""A thread as a lane."""

import atexit
import contextlib
import contextvars
import ctypes
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import GeneratorType
from typing import Any

import torch

from .base import Flight, FlightTimes, Lane, Phases, in_profile, keep, whole

TIME_TO_END = 2.0  # seconds that threads have to end before the interpreter does


class CpuLane(Lane):
    """One thread, started with the first work. It is a daemon: a stuck peer must not keep the process alive."""

    def __init__(self, name: str = "baguakit lane") -> None:
        self._name = name
        self._work: queue.SimpleQueue[CpuFlight | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._beside: CpuLane | None = None
        self._latest: PhasedFlight | None = None  # whose last phase is not due yet

    def run(self, work: Callable[[], Any], name: str = "", _flight: "CpuFlight | None" = None) -> "CpuFlight":
        with in_profile("launch", name):
            flight = CpuFlight(work, name) if _flight is None else _flight
            self._latest = None
            self._work.put(flight)
            if self._thread is None:
                self._thread = threading.Thread(target=_fly_all, args=(self._work,), name=self._name, daemon=True)
                self._thread.start()
                _threads[self._thread] = self._work
        return flight

    def here(self) -> bool:
        return threading.current_thread() is self._thread

    def fly(self, work: Callable[[], Phases], name: str = "") -> "PhasedFlight":
        if self._beside is None:
            self._beside = CpuLane(f"{self._name}, beside")
        flight = PhasedFlight(work, name, self, self._beside)
        self.run(work, name, flight)
        self._latest = flight
        return flight

    def flush(self) -> None:
        if self._latest is not None:
            self.run(lambda: None)

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
    held: PhasedFlight | None = None
    beside: CpuLane | None = None
    with torch.no_grad():
        while (flight := work.get()) is not None:
            if held is not None and not isinstance(flight, PhasedFlight):
                held.finish()
                held = None
            flight.fly()
            if isinstance(flight, PhasedFlight):
                if held is not None:
                    held.finish()
                held, beside = flight, flight.beside
            del flight  # the thread waits for work without holding on to the last result
        if held is not None:
            held.finish()
    if beside is not None:
        beside.close()


class CpuFlight(Flight):
    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self._work: Callable[[], Any] | None = work
        self._name = name
        self._lock, self._over = threading.Lock(), False
        self._gate = threading.Lock()  # held until it is over: an Event takes several Python calls to be set
        self._gate.acquire()
        self._launched = time.perf_counter()
        self._phases: list[tuple[float, float]] = []
        self._waits: list[tuple[float, float]] = []

    def fly(self) -> None:
        """Do the work; on the lane's thread."""
        if self._over or self._work is None:
            return
        began = time.perf_counter()
        try:
            with in_profile("", self._name):
                value = self._work()
                if type(value) is GeneratorType:
                    value = whole(value)
            self._finish(began, value=value)
        except BaseException as error:
            self._finish(began, error=error)

    def _finish(self, began: float, value: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            if not self._over:
                self._value, self._error, self._work = value, error, None
                self._phases.append((began, time.perf_counter()))
                self._over = True
                self._gate.release()

    def fail(self, error: BaseException) -> None:
        self._finish(time.perf_counter(), error=error)

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
        return FlightTimes(self._launched, tuple(self._phases), tuple(self._waits))


class PhasedFlight(CpuFlight):
    """A flight on two lanes; its methods `fly` and `finish` are called on the thread of the first."""

    def __init__(self, work: Callable[[], Phases], name: str, lane: CpuLane, beside: CpuLane) -> None:
        super().__init__(work, name)
        self._lane, self.beside, self._between = lane, beside, CpuFlight(lambda: None, "")
        self._context = contextvars.copy_context()  # another flight begins between the phases of this one
        self._rest: Phases | None = None

    @property
    def held(self) -> bool:
        return self._lane._latest is self and self._between.done()

    def fly(self) -> None:
        """Do the first phase, and put the second on the lane beside."""
        if not self._over and self._work is not None:
            self._rest = self._work()
            self._step_on()

    def finish(self) -> None:
        """Do the phases that are left, each when the one before it has ended on the other lane."""
        while not self._over:
            with self._between._gate:
                pass
            self._step_on()
        self._rest = None

    def _step_on(self) -> None:
        """Do the next phase here, and put the one after it on the lane beside."""
        self._step()
        if not self._over:
            self._between = self.beside.run(self._step)

    def _step(self) -> None:
        if self._over or self._rest is None:
            return
        began = time.perf_counter()
        try:
            with in_profile("", self._name):
                self._context.run(next, self._rest)
            self._phases.append((began, time.perf_counter()))
        except StopIteration as end:
            self._finish(began, value=end.value)
        except BaseException as error:
            self._finish(began, error=error)

    def flush(self) -> None:
        if self._lane._latest is self:
            self._lane.flush()

    def result(self) -> Any:
        self.flush()
        return super().result()
