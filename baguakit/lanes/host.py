"""A thread that works for a device whose tensors are sent from the memory of the host.

Where the device has streams, each thread of the lane has its own, and every phase of a flight begins after the work
that was on the current stream at the launch, and after the phase before it. The thread waits for copies to the host.
The caller waits for the thread as on a CPU, since data have to arrive before anything can copy them to the device, and
then its current stream, not the host, waits for what the thread has left to the device.
"""

import contextlib
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any

import torch
from torch import Tensor

from .base import Phases
from .cpu import CpuFlight, CpuLane, whole
from .cuda import tensors_in


def streams_of(device: torch.device) -> Any:
    """Return torch's module for the streams and events of a device, such as `torch.cuda`; None if it has none."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") and hasattr(module, "current_stream") else None


def current_stream(device: torch.device) -> Any:
    """Return the current stream of `device`; None if it has no streams."""
    module = streams_of(device)
    return None if module is None else module.current_stream(device)


def mark(device: torch.device) -> Any:
    """Return an event on the current stream of `device`; None if it has no streams."""
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


def finish(device: torch.device) -> None:
    """Let the host wait until the current stream of `device` has done all its work."""
    if (event := mark(device)) is not None:
        event.synchronize()


def kept_for(tensors: Iterable[Tensor], stream: Any) -> None:
    """Keep the memory of `tensors`, which other streams allocated, until `stream` has used them."""
    for tensor in tensors if stream is not None else ():
        if not tensor.is_cpu:
            with contextlib.suppress(NotImplementedError, RuntimeError):  # a device whose allocator needs no such call
                tensor.record_stream(stream)


class HostLane(CpuLane):
    """A lane of one thread, for tensors on `device`."""

    def __init__(self, device: torch.device, name: str = "baguakit lane") -> None:
        super().__init__(name)
        self.device, module = device, streams_of(device)
        self.stream = None if module is None else module.Stream(device)
        self._others: list[Any] = []  # streams for which the next flight also waits

    def another(self, name: str) -> "HostLane":
        return HostLane(self.device, name)

    def enter(self) -> contextlib.AbstractContextManager[Any]:
        if self.stream is None:
            return contextlib.nullcontext()
        return streams_of(self.device).stream(self.stream)  # type: ignore[no-any-return]

    def flight(self, work: Callable[[], Any], name: str, lane: CpuLane | None) -> "HostFlight":
        others, self._others = self._others, []
        return HostFlight(self.device, [mark(self.device), *others], work, name, lane)

    def follow(self, streams: Iterable[Any]) -> None:
        here = current_stream(self.device)
        self._others += [stream.record_event() for stream in streams if stream != here]

    def uses(self, value: Any) -> None:
        kept_for(tensors_in(value), self.stream)


class HostFlight(CpuFlight):
    def __init__(
        self, device: torch.device, after: list[Any], work: Callable[[], Any], name: str, lane: CpuLane | None
    ) -> None:
        self._device, self._after = device, after  # events for which the next phase waits
        super().__init__((lambda: self._ordered(work)) if lane else (lambda: whole(self._ordered(work))), name, lane)

    def _ordered(self, work: Callable[[], Any]) -> Phases:
        """Do the phases of `work`, each after the device has done the phase before."""
        self._begin()
        made = work()
        if type(made) is not GeneratorType:
            self._after = [mark(self._device)]
            return made
        while True:
            try:
                read = next(made)
            except StopIteration as end:
                self._after = [mark(self._device)]
                return end.value
            self._after = [mark(self._device)]
            yield read
            self._begin()
            kept_for(tensors_in(read), current_stream(self._device))

    def _begin(self) -> None:
        for event in filter(None, self._after):
            current_stream(self._device).wait_event(event)

    def result(self) -> Any:
        value = super().result()
        self._begin()
        kept_for(tensors_in(value), current_stream(self._device))
        return value
