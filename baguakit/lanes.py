"""Lanes: where work flies while training goes on. A CUDA stream; on CPU, a thread.

Work put on a lane runs in the order in which it was put there. `Flight` is one piece of it under way.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Flight:
    """Work on a lane: `done()` asks, `result()` waits for it."""

    def done(self) -> bool:
        """Whether the work has been finished; never waits."""
        raise NotImplementedError

    def result(self) -> Any:
        """What the work returned, or what it raised. On CUDA the current stream waits, and the host does not."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """End the flight with `error`, unless it is done."""

    def forget(self) -> None:
        """Let go of the result: who keeps the flight for its times need not keep its memory."""

    def seconds(self) -> tuple[float, float]:
        """How long the work took on its lane, and how long training stood still for it (synchronises on CUDA)."""
        raise NotImplementedError


class Lane:
    """Runs work in order, beside the training loop."""

    def run(self, work: Callable[[], Any]) -> Flight:
        """Put `work` on the lane."""
        raise NotImplementedError

    def close(self, wait: bool = True) -> None:
        """Take no more work, and let what is under way end; without `wait`, also when it is stuck."""


class CudaLane(Lane):
    """A stream of its own. Work sees all that the current stream did before it was launched."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], Any]) -> "CudaFlight":
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            began = self.stream.record_event(torch.cuda.Event(enable_timing=True))
            value = work()
            ended = self.stream.record_event(torch.cuda.Event(enable_timing=True))
        return CudaFlight(self.device, value, began, ended)

    def close(self, wait: bool = True) -> None:
        if wait:
            self.stream.synchronize()


class CudaFlight(Flight):
    def __init__(self, device: torch.device, value: Any, began: Any, ended: Any) -> None:
        self._device, self._value, self._began, self._ended = device, value, began, ended
        self._waited: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        return self._error is not None or bool(self._ended.query())

    def fail(self, error: BaseException) -> None:
        self._error = error

    def forget(self) -> None:
        self._value = None

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        stream = torch.cuda.current_stream(self._device)
        if self._waited is None:
            self._waited = stream.record_event(torch.cuda.Event(enable_timing=True))
        stream.wait_event(self._ended)
        # The result was allocated on the lane's stream; without this its memory could be handed out again
        # to the lane while the current stream still reads it.
        for tensor in tensors_in(self._value):
            tensor.record_stream(stream)
        return self._value

    def seconds(self) -> tuple[float, float]:
        self._ended.synchronize()
        flown = self._began.elapsed_time(self._ended) / 1e3
        if self._waited is None:
            return flown, 0.0
        self._waited.synchronize()
        return flown, max(0.0, self._waited.elapsed_time(self._ended) / 1e3)


class CpuLane(Lane):
    """One thread, started with the first work. It is a daemon: a stuck peer must not keep the process alive."""

    def __init__(self, name: str = "baguakit lane") -> None:
        self._name = name
        self._work: queue.SimpleQueue[CpuFlight | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Any]) -> "CpuFlight":
        flight = CpuFlight(work)
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
    with torch.no_grad():
        while (flight := work.get()) is not None:
            flight.fly()
            del flight  # the thread waits for work without holding on to the last result


class CpuFlight(Flight):
    def __init__(self, work: Callable[[], Any]) -> None:
        self._work: Callable[[], Any] | None = work
        self._finished, self._lock = threading.Event(), threading.Lock()
        self._value: Any = None
        self._error: BaseException | None = None
        self._began = self._ended = self._waited = 0.0

    def fly(self) -> None:
        """Do the work; on the lane's thread."""
        if self._finished.is_set() or self._work is None:
            return
        self._began = time.perf_counter()
        try:
            self._finish(value=self._work())
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
        self._finished.wait()
        self._waited += time.perf_counter() - before
        if self._error is not None:
            raise self._error
        return self._value

    def seconds(self) -> tuple[float, float]:
        return self._ended - self._began, self._waited


def lane(device: torch.device, name: str = "baguakit lane") -> Lane:
    """A new lane for tensors on `device`."""
    return CudaLane(device) if device.type == "cuda" else CpuLane(name)


_lanes: "weakref.WeakKeyDictionary[Any, Lane]" = weakref.WeakKeyDictionary()


def lane_of(group: Any, device: torch.device) -> Lane:
    """The lane on which work launched by hand in `group` flies: one for each group, so that its order is kept."""
    if group not in _lanes:
        _lanes[group] = lane(device)
        if isinstance(_lanes[group], CpuLane):
            weakref.finalize(group, _lanes[group].close, False)
    return _lanes[group]


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a tensor, or in nested lists, tuples and dicts of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for each in value for t in tensors_in(each)] if isinstance(value, list | tuple) else []
