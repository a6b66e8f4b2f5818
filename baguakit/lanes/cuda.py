"""A CUDA stream as a lane: the host launches the work at once, without a thread."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .base import Flight, FlightTimes, Lane, in_profile
from .moments import moment

# Of the stream of every lane, 0 or −1, which is higher. With −1 kernels of codecs need not queue behind those of
# backward, as FSDP2 has it for its own; with 0 they take nothing from backward. Not measured yet: see the part
# "overlap" of scripts/gpu.
PRIORITY = 0


def current_stream(device: torch.device) -> Any:
    """Return the current stream of `device`; None where there are no streams."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


class CudaLane(Lane):
    """A lane with a stream of its own. Work waits for all that the current stream was given before the launch."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device, priority=PRIORITY)

    def run(self, work: Callable[[], Any], name: str = "") -> "CudaFlight":
        with in_profile("launch", name):
            launched = moment(self.device)
            self.stream.wait_event(launched)
            with torch.cuda.stream(self.stream), torch.no_grad(), in_profile("", name):
                began, value, error = moment(self.device), None, None
                try:
                    value = work()
                except Exception as raised:  # the flight's, as on a CPU: whoever waits for it learns whose fault it is
                    error = raised
                ended = moment(self.device)
        flight = CudaFlight(self.device, value, (launched, began, ended), name)
        if error is not None:
            flight.fail(error)
        return flight

    def follow(self, streams: Iterable[Any]) -> None:
        here = torch.cuda.current_stream(self.device)
        for stream in streams:
            if stream != here:  # for which all work waits
                self.stream.wait_stream(stream)

    def uses(self, value: Any) -> None:
        for tensor in tensors_in(value):
            if tensor.is_cuda:
                tensor.record_stream(self.stream)

    def idle(self) -> bool:
        return bool(self.stream.query())

    def close(self, wait: bool = True) -> None:
        if wait:
            self.stream.synchronize()


class CudaFlight(Flight):
    on_device = True

    def __init__(self, device: torch.device, value: Any, moments: tuple[Any, Any, Any], name: str) -> None:
        self._device, self._value, self._name = device, value, name
        self._launched, self._began, self._ended = moments
        self._waited: Any = None

    def done(self) -> bool:
        return self._error is not None or bool(self._ended.query())

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        stream = torch.cuda.current_stream(self._device)
        with in_profile("wait for", self._name):
            if self._waited is None:
                self._waited = moment(self._device)
            stream.wait_event(self._ended)
        # The result was allocated on the lane's stream; without this its memory could be handed out again
        # to the lane while the current stream still reads it.
        for tensor in tensors_in(self._value):
            tensor.record_stream(stream)
        return self._value

    def over(self) -> bool:
        return bool(self._ended.query()) and (self._waited is None or bool(self._waited.query()))

    def times(self) -> FlightTimes:
        waits = () if self._waited is None else ((self._waited, self._ended),)
        return FlightTimes(self._launched, self._began, self._ended, waits)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a tensor, or in nested lists, tuples and dicts of them."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for each in value for t in tensors_in(each)] if isinstance(value, list | tuple) else []
