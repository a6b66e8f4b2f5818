"""A CUDA stream as a lane. The host launches work at once, without a thread; a last phase waits until it is due."""

import contextvars
from collections.abc import Callable, Iterable
from types import GeneratorType
from typing import Any

import torch

from .base import Flight, Lane, Phases, in_profile, kept_for, moment, tensors_in

# The priority of lanes' streams. The other priority, −1, is higher: FSDP2 uses it, so that its streams do not queue
# behind backward. When ranks shared one H200, steps took equally long with both priorities: see bench/README.md.
PRIORITY = 0


class CudaLane(Lane):
    """A lane with a separate stream. Work begins after all work that was on the current stream at the launch."""

    def __init__(self, device: torch.device) -> None:
        self.device = self.clock = device
        self.stream = torch.cuda.Stream(device, priority=PRIORITY)
        self._beside: Any = None  # another stream
        self._held: CudaFlight | None = None  # whose last phase is not due yet

    def run(self, work: Callable[[], Any], name: str = "", in_phases: bool = False) -> "CudaFlight":
        if not in_phases:
            self.flush()
        elif self._beside is None:
            self._beside = torch.cuda.Stream(self.device, priority=PRIORITY)
        with in_profile("launch", name):
            flight = CudaFlight(self, name, work)
            flight.step(self.stream)
            if in_phases:
                flight.step(self._beside)
            while not in_phases and not flight.given:
                flight.step(self.stream)
        if in_phases:
            self.flush()
            self._held = flight
        return flight

    def flush(self) -> None:
        held, self._held = self._held, None
        while held is not None and not held.given:
            held.step(self.stream)
            held.step(self._beside)

    def follow(self, streams: Iterable[Any]) -> None:
        here = torch.cuda.current_stream(self.device)
        for stream in streams:
            if stream != here:  # for which all work waits
                self.stream.wait_stream(stream)

    def uses(self, value: Any) -> None:
        kept_for(tensors_in(value), self.stream)

    def idle(self) -> bool:
        return bool(self.stream.query())  # it waits for the other

    def close(self, wait: bool = True) -> None:
        if wait:
            self.flush()
            self.stream.synchronize()


class CudaFlight(Flight):
    on_device = True

    def __init__(self, lane: CudaLane, name: str, work: Callable[[], Any]) -> None:
        self._lane, self._device, self._name = lane, lane.device, name
        self.launched = self._ended = moment(lane.device)  # `_ended`: of the phases so far
        self._work: Callable[[], Any] | None = work
        self.given = False  # the device has been given all phases
        self._context = contextvars.copy_context()  # another flight begins between the phases of this one
        self.phases: list[tuple[Any, Any]] = []
        self.waits: list[tuple[Any, Any]] = []
        self._rest: Phases | None = None
        self._read: Any = None  # what the next phase reads

    def step(self, stream: Any) -> None:
        """Enqueue the next phase, if any, on a stream. Work without phases is one phase."""
        if self.given:
            return
        stream.wait_event(self._ended)
        with torch.cuda.stream(stream), torch.no_grad(), in_profile("", self._name):
            kept_for(tensors_in(self._read), stream)  # made on another stream, whose work may get their memory
            began = moment(self._device)
            try:
                self._next()
            except Exception as raised:  # the flight's, as on a CPU: whoever waits for it learns whose fault it is
                self.fail(raised)
            self._ended = moment(self._device)
            self.phases.append((began, self._ended))

    def _next(self) -> None:
        if self._work is not None:
            work, self._work = self._work, None  # a report keeps the flight
            made = work()
            if type(made) is not GeneratorType:
                self.value, self.given = made, True
                return
            self._rest = made
        if (rest := self._rest) is not None:  # else another thread has failed it
            try:
                self._read = self._context.run(next, rest)
            except StopIteration as end:
                self.value, self.given, self._read, self._rest = end.value, True, None, None

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.given, self._read, self._rest = True, None, None

    @property
    def held(self) -> bool:
        return not self.given and bool(self._ended.query())

    def done(self) -> bool:
        return self._error is not None or (self.given and bool(self._ended.query()))

    def flush(self) -> None:
        if self._lane._held is self:
            self._lane.flush()

    def result(self) -> Any:
        self.flush()
        if self._error is not None:
            raise self._error
        stream = torch.cuda.current_stream(self._device)
        with in_profile("wait for", self._name):
            if not self.waits:
                self.waits.append((moment(self._device), self._ended))
            stream.wait_event(self._ended)
        # The result was allocated on the lane's stream. Without this call, the allocator could give its memory to new
        # work of the lane while the current stream still reads it.
        kept_for(tensors_in(self.value), stream)
        return self.value

    def over(self) -> bool:
        return self.given and all(bool(each.query()) for each in (self._ended, *(wait[0] for wait in self.waits)))
