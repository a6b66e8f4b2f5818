"""A thread as a lane."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from . import temporaries
from .base import Flight, Lane, Passage
from .ranges import in_profile


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
        return flight

    def close(self, wait: bool = True) -> None:
        if self._thread is not None:
            self._work.put(None)
            if wait:
                self._thread.join()
            self._thread = None


def _fly_all(work: "queue.SimpleQueue[CpuFlight | None]") -> None:
    temporaries.keep()
    with torch.no_grad():
        while (flight := work.get()) is not None:
            flight.fly()
            del flight  # the thread waits for work without holding on to the last result


class CpuFlight(Flight):
    def __init__(self, work: Callable[[], Any], name: str) -> None:
        self._work: Callable[[], Any] | None = work
        self._name = name
        self._finished, self._lock = threading.Event(), threading.Lock()
        self._value: Any = None
        self._error: BaseException | None = None
        self._launched = self._began = self._ended = time.perf_counter()
        self._waits: list[tuple[float, float]] = []

    def fly(self) -> None:
        """Do the work; on the lane's thread."""
        if self._finished.is_set() or self._work is None:
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
            if not self._finished.is_set():
                self._value, self._error, self._work = value, error, None
                self._ended = time.perf_counter()
                self._finished.set()

    def fail(self, error: BaseException) -> None:
        self._finish(error=error)

    def forget(self) -> None:
        self._value = None

    def done(self) -> bool:
        return self._finished.is_set()

    def result(self) -> Any:
        before = time.perf_counter()
        with in_profile("wait for", self._name):
            self._finished.wait()
        self._waits.append((before, time.perf_counter()))
        if self._error is not None:
            raise self._error
        return self._value

    def passage(self) -> Passage:
        return Passage(self._launched, self._began, self._ended, tuple(self._waits))
