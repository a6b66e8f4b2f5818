"""The interface of CPU and CUDA lanes.

A flight may have phases, such as a mean within nodes, between nodes, and within nodes again, or the two hops of a
compressed mean. Its phases alternate between two lanes. With the phases a, b and c of flights k = 1, 2, …, the lanes do

    this lane         a₁    a₂ c₁    a₃ c₂    …
    the lane beside      b₁       b₂       …

So b of a flight overlaps a of the next flight and c of the previous flight. The last phase of a flight becomes due when
more work is launched on its lane, when `flush` is called, or when its result is awaited. These are calls of the host,
which all ranks make in the same order.

There is no deadlock, if the first and last phases use other process groups than the phases between them, so that each
group is used on one lane only; or if only the first phase has collectives, and the others have messages with tags of
their own. Every rank puts its work on the lanes in the order a₁ b₁ a₂ c₁ b₂ a₃ c₂ …, and work waits only for work that
is earlier in this order. So the earliest unfinished work has begun, or can begin, on all ranks, and it ends. Work
without phases begins when both lanes have done all earlier work.

A moment is seconds of `time.perf_counter` or, on CUDA, an event in a stream. Only reading the event's time waits.

A CPU lane keeps the memory of a flight's temporary tensors for the next flight. CPU allocators return large blocks to
the system, and allocating them again costs a page fault for every 4 KiB: filling 16 MiB took 3.6 ms the first time and
0.7 ms the second time (one thread of a virtual machine). CUDA's allocator keeps its blocks.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

Moment = Any


def moment(device: torch.device) -> Moment:
    """Return the current moment of the host or of the current stream of `device`, without waiting."""
    if device.type != "cuda":
        return time.perf_counter()
    return torch.cuda.current_stream(device).record_event(torch.cuda.Event(enable_timing=True))


def passed(when: Moment) -> bool:
    """Return True if a moment has passed, so that `between` need not wait for it."""
    return isinstance(when, float) or bool(when.query())


def between(a: Moment, b: Moment) -> float:
    """Return the seconds from moment `a` to moment `b` of the same device. Waits until both have passed."""
    if isinstance(a, float):
        return float(b - a)
    for event in (a, b):
        event.synchronize()
    return float(a.elapsed_time(b)) / 1e3


def reader(device: torch.device) -> Callable[[Moment], float]:
    """Return a function that converts moments of a device to seconds of `time.perf_counter`. Synchronises on CUDA.

    On CUDA, an event is timed by its distance to an event made now. CUDA returns distances in fp32 milliseconds, so the
    resolution at a distance of 100 s is 8 µs.
    """
    if device.type != "cuda":
        return float
    torch.cuda.synchronize(device)
    now = moment(device)
    now.synchronize()
    host = time.perf_counter()
    return lambda when: host - between(when, now)


Phases = Generator[Any, None, Any]
"""Work whose phases run in turn on a lane and on the lane beside it. It yields the tensors for the next phase."""


class Flight:
    """Work on a lane: `done()` queries it, `result()` waits for it. This base class is a placeholder and never ends."""

    on_device = False  # `result()` makes a stream wait, not the host: the work may still be running then
    launched: Moment = None
    phases: Sequence[tuple[Moment, Moment]] = ()  # the begin and end of each phase of its work
    waits: Sequence[tuple[Moment, Moment]] = ()  # of each wait; a wait after the end ends before it begins
    value: Any = None  # the result; a flight may be kept for its times without that memory
    _error: BaseException | None = None

    @property
    def held(self) -> bool:
        """Return True if only the last phase is left, and it is not due yet."""
        return False

    def flush(self) -> None:
        """Make the last phase due."""

    def done(self) -> bool:
        """Return True if the work has ended. Never waits."""
        return False

    def result(self) -> Any:
        """Return the result of the work, or raise its error. On CUDA the current stream waits, not the host."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """End the flight with `error`: from now on, `result` raises it. A CPU flight that is done does not change."""
        self._error = error

    def over(self) -> bool:
        """Return True if all recorded moments have passed, so that reading them does not wait."""
        return self.done()

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of work on the lanes, and the seconds that training waited. Waits unless `over()`."""
        return sum(between(*phase) for phase in self.phases), sum(max(0.0, between(*wait)) for wait in self.waits)


class Lane:
    """A queue of work that runs in order, beside the training loop.

    Its moments are those of the device `clock`: of the CPU if a thread does the work, and the host waits for it.
    """

    clock = torch.device("cpu")

    def run(self, work: Callable[[], Any], name: str = "", in_phases: bool = False) -> Flight:
        """Put `work` on the lane, in the phases of the module's docstring if `in_phases`. `name` is for profilers."""
        raise NotImplementedError

    def flush(self) -> None:
        """Make the last phase of the latest flight due."""

    def follow(self, streams: Iterable[Any]) -> None:
        """Make work that is launched from now on wait for `streams`, and for the current stream as usual."""

    def uses(self, value: Any) -> None:
        """Keep the memory of the tensors in `value`, which other streams allocated, until this lane has used them."""

    def rest(self, seconds: float) -> None:
        """Wait until the launched work has ended on the host, but no longer than `seconds`."""

    def here(self) -> bool:
        """Return True if this is called on the thread of the lane; always False for a lane without a thread."""
        return False

    def idle(self) -> bool:
        """Return False while a GPU still works for this lane; always True for a CPU lane."""
        return True

    def close(self, wait: bool = True) -> None:
        """Accept no more work, and wait for the launched work. Without `wait`, return at once, as work may be stuck."""


NO_RANGE: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def in_profile(what: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context that records a range in the active profiler: a launch, work on a lane, or a wait for it.

    Without a profiler or a name there is no range, since a range costs microseconds. On CPU the work is on another
    thread: `torch.profiler` records it if it profiles all threads. A range begins and ends in one call on one thread,
    because a flight may outlive the profiler, and a longer range would then write to freed memory.
    """
    if not (name and profiler._is_profiler_enabled):
        return NO_RANGE
    return profiler.record_function(f"baguakit: {what} {name}" if what else f"baguakit: {name}")


New = Callable[[Tensor], Tensor]
"""A function that returns an uninitialised, contiguous tensor with the shape, dtype and device of its argument."""


class _Memory(threading.local):
    kept: list[Tensor] | None = None  # bytes; None on threads that do not keep their temporaries until they end
    taken: int = 0


_memory = _Memory()


@contextlib.contextmanager
def temporaries() -> Iterator[New]:
    """Yield a function that makes tensors for use in the `with` body only, as in `torch.sub(x, y, out=new(x))`."""
    taken = _memory.taken
    try:
        yield _new
    finally:
        _memory.taken = taken


def _new(like: Tensor) -> Tensor:
    kept, i, nbytes = _memory.kept, _memory.taken, like.nbytes
    if kept is None or not like.is_cpu:
        return torch.empty(like.shape, dtype=like.dtype, device=like.device)
    _memory.taken += 1
    kept.extend(torch.empty(0, dtype=torch.uint8) for _ in range(i + 1 - len(kept)))
    if kept[i].numel() < nbytes:
        kept[i] = torch.empty(nbytes, dtype=torch.uint8)
    return kept[i][:nbytes].view(like.dtype).view(like.shape)


def streams_of(device: torch.device) -> Any:
    """Return torch's module for the streams and events of a device, such as `torch.cuda`; None if it has none."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") and hasattr(module, "current_stream") else None


def current_stream(device: torch.device) -> Any:
    module = streams_of(device)
    return None if module is None else module.current_stream(device)


def mark(device: torch.device) -> Any:
    stream = current_stream(device)
    return None if stream is None else stream.record_event()


def finish(device: torch.device) -> None:
    """Let the host wait until the current stream of `device` has done all its work."""
    if (event := mark(device)) is not None:
        event.synchronize()


def kept_for(tensors: Iterable[Tensor], stream: Any) -> None:
    """Keep the memory of `tensors`, which other streams allocated, until `stream` has used them."""
    for tensor in tensors if stream is not None else ():
        if not tensor.is_cpu:  # some devices, but not CUDA, have an allocator that needs no such call and knows none
            with contextlib.suppress(*() if tensor.is_cuda else (NotImplementedError, RuntimeError)):
                tensor.record_stream(stream)


def tensors_in(value: Any) -> list[Tensor]:
    """Return a list of the tensors in `value`: a tensor, or nested lists, tuples and dicts of tensors."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for each in value for t in tensors_in(each)] if isinstance(value, list | tuple) else []
