"""Lanes that are threads, for CPU tensors and for tensors that are sent from the memory of the host."""

import atexit
import contextlib
import contextvars
import ctypes
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any

import torch
from torch.autograd import profiler

from . import base
from .base import NO_RANGE, Flight, Lane, Phases, current_stream, in_profile, kept_for, mark, streams_of, tensors_in

TIME_TO_END = 2.0  # seconds that threads have to end before the interpreter does


class CpuLane(Lane):
    """A lane of one thread, started with the first work. The thread is a daemon, so it does not block process exit.

    Tensors of another `device` are sent from the memory of the host. Where the device has streams, each thread of the
    lane has its own, and every phase of a flight begins after the work that was on the current stream at the launch,
    and after the phase before it. The thread waits for copies to the host. The caller waits for the thread as on a CPU,
    since data have to arrive before anything can copy them to the device, and then its current stream, not the host,
    waits for what the thread has left to the device.
    """

    def __init__(self, name: str = "baguakit lane", device: torch.device = Lane.clock) -> None:
        self._name, self.device, module = name, device, streams_of(device)
        self.stream = None if module is None else module.Stream(device)
        self._others: list[Any] = []  # streams for which the next flight also waits
        self._work: queue.SimpleQueue[CpuFlight | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.beside: CpuLane | None = None
        self.latest: CpuFlight | None = None  # whose last phase is not due yet

    def run(self, work: Callable[[], Any], name: str = "", in_phases: bool = False) -> "CpuFlight":
        if in_phases and self.beside is None:
            self.beside = CpuLane(f"{self._name}, beside", self.device)
        with in_profile("launch", name) if profiler._is_profiler_enabled else NO_RANGE:
            flight = CpuFlight(work, name, self if in_phases else None)
            if self.stream is not None:
                flight.follow(self.device, [mark(self.device), *self._others])
                self._others = []
            self.latest = flight if in_phases else None
            self._work.put(flight)
            if self._thread is None:
                self._thread = threading.Thread(target=_fly_all, args=(self,), name=self._name, daemon=True)
                self._thread.start()
                _threads[self._thread] = self._work
        return flight

    def here(self) -> bool:
        return threading.current_thread() is self._thread

    def flush(self) -> None:
        if self.latest is not None:
            self.run(lambda: None)

    def follow(self, streams: Iterable[Any]) -> None:
        here = current_stream(self.device)
        self._others += [stream.record_event() for stream in streams if self.stream is not None and stream != here]

    def uses(self, value: Any) -> None:
        if self.stream is not None:
            kept_for(tensors_in(value), self.stream)

    def rest(self, seconds: float) -> None:
        self.run(lambda: None).wait(seconds)

    def close(self, wait: bool = True) -> None:
        if self._thread is not None:
            self._work.put(None)
            if wait:
                self._thread.join()
            self._thread = None


_threads: "weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue[Any]]" = weakref.WeakKeyDictionary()


@atexit.register
def end_threads() -> None:
    """End the threads of all lanes at exit, because a thread that runs on after the exit may abort the process.

    A thread that waits in torch for a peer may not end in time. When its call of torch returns, Python before 3.14 ends
    the thread. C++ treats this as an error and aborts. So, on Linux, C++'s handler of this error becomes `pause`.
    """
    until, threads = time.monotonic() + TIME_TO_END, list(_threads.items())
    for _, work in threads:
        with contextlib.suppress(queue.Empty):
            while True:
                work.get_nowait()
        work.put(None)
    for thread, _ in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if sys.platform == "linux" and any(thread.is_alive() for thread, _ in threads):
        with contextlib.suppress(OSError, AttributeError):  # another C++ library: it aborts as before
            set_terminate = ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE
            set_terminate(ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p))


def _fly_all(lane: CpuLane) -> None:
    work, inside = lane._work, NO_RANGE if lane.stream is None else streams_of(lane.device).stream(lane.stream)
    del lane  # which ends with its user, not with its thread
    base._memory.kept = []
    held: CpuFlight | None = None  # its last phases are to be done here
    beside: CpuLane | None = None
    with torch.no_grad(), inside:
        while (flight := work.get()) is not None:
            if held is not None and flight.lane is None:
                held.finish()
                held = None
            flight.fly()
            if flight.lane is not None:
                if held is not None:
                    held.finish()
                held, beside = flight, flight.lane.beside
            del flight  # the thread waits for work without holding on to the last result
        if held is not None:
            held.finish()
    if beside is not None:
        beside.close()


class CpuFlight(Flight):
    """Work of a lane's thread, which calls `fly` and `finish`. Phases run in turn on `lane` and the lane beside it."""

    def __init__(self, work: Callable[[], Any], name: str, lane: CpuLane | None = None) -> None:
        self._work: Callable[[], Any] | None = work
        self._name, self.lane = name, lane
        self._lock, self._over = threading.Lock(), False
        self._gate = threading.Lock()  # held until it is over: an Event takes several Python calls to be set
        self._gate.acquire()
        self.launched = time.perf_counter()
        self.phases: list[tuple[float, float]] = []
        self.waits: list[tuple[float, float]] = []
        if lane is not None:
            self._between: Flight = Flight()  # the phase on the lane beside
            self._context = contextvars.copy_context()  # another flight begins between the phases of this one
            self._rest: Phases | None = None
        self._device = Lane.clock
        self._after: list[Any] = []  # of a device with streams: events for which the next phase, or reader, waits

    def follow(self, device: torch.device, after: list[Any]) -> None:
        """Let the streams of `device` wait: each phase for the one before, and the first one for the events `after`."""
        work, self._device, self._after = self._work, device, after
        self._work = lambda: self._ordered(work)

    def _ordered(self, work: Any) -> Phases:
        """Do the phases of `work`, each after the device has done the phase before."""
        self._begin()
        made = work()
        while type(made) is GeneratorType:
            try:
                read = next(made)
            except StopIteration as end:
                made = end.value
                break
            self._after = [mark(self._device)]
            yield read
            self._begin(read)
        self._after = [mark(self._device)]
        return made

    def _begin(self, read: Any = ()) -> None:
        """Let the current stream wait for the events, and keep the memory of what it reads until it has done so."""
        stream = current_stream(self._device)
        for event in self._after:
            stream.wait_event(event)
        kept_for(tensors_in(read), stream)

    def fly(self) -> None:
        """Do the work. If it has phases, do the first phase, and put the second one on the lane beside this lane."""
        if self._over or self._work is None:
            return
        if self.lane is not None:
            self._rest = self._work()
            self._step_on()
            return
        began = time.perf_counter()
        try:
            with in_profile("", self._name) if profiler._is_profiler_enabled else NO_RANGE:
                value = self._work()
                if type(value) is GeneratorType:
                    value = whole(value)
            self._finish(began, value=value)
        except BaseException as error:
            self._finish(began, error=error)

    def finish(self) -> None:
        """Do the remaining phases of this lane, each after the phase before it has ended on the other lane."""
        while not self._over:
            assert isinstance(self._between, CpuFlight)
            self._between.wait()
            self._step_on()
        self._rest = None

    def _step_on(self) -> None:
        """Do the next phase on this thread, and put the phase after it on the lane beside this lane."""
        self._step()
        if not self._over and self.lane is not None and self.lane.beside is not None:
            self._between = self.lane.beside.run(self._step)

    def _step(self) -> None:
        if self._over or self._rest is None:
            return
        began = time.perf_counter()
        try:
            with in_profile("", self._name):
                self._context.run(next, self._rest)
            self.phases.append((began, time.perf_counter()))
        except StopIteration as end:
            self._finish(began, value=end.value)
        except BaseException as error:
            self._finish(began, error=error)

    def _finish(self, began: float, value: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            if not self._over:
                self.value, self._error, self._work = value, error, None
                self.phases.append((began, time.perf_counter()))
                self._over = True
                self._gate.release()

    def fail(self, error: BaseException) -> None:
        self._finish(time.perf_counter(), error=error)

    def done(self) -> bool:
        return self._over

    @property
    def held(self) -> bool:
        return not self._over and self.lane is not None and self.lane.latest is self and self._between.done()

    def flush(self) -> None:
        if self.lane is not None and self.lane.latest is self:
            self.lane.flush()

    def wait(self, seconds: float = -1) -> bool:
        """Wait until the work has ended, at most `seconds` (−1: no limit). Return True if it has ended."""
        if passed := self._gate.acquire(timeout=seconds):
            self._gate.release()
        return passed

    def result(self) -> Any:
        if self.lane is not None:
            self.flush()
        before = time.perf_counter()
        with in_profile("wait for", self._name) if profiler._is_profiler_enabled else NO_RANGE, self._gate:
            pass
        self.waits.append((before, time.perf_counter()))
        if self._error is not None:
            raise self._error
        if self._after:
            self._begin(self.value)
        return self.value


def whole(phases: Phases) -> Any:
    """Do all phases of work on this thread, one after another, and return the result of the work."""
    while True:
        try:
            next(phases)
        except StopIteration as end:
            return end.value
