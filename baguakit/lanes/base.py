"""The interface of lanes of both kinds.

A flight in phases, such as a mean within nodes, between them and within them again, flies on two lanes by turns, which
move data over different links. Of flights k = 1, 2, … with the phases a, b and c, the lanes do

    this lane         a₁    a₂ c₁    a₃ c₂    …
    the one beside       b₁       b₂       …

So b of one flight overlaps a of the next and c of the one before. The last phase of a flight is due when the next work
comes to its lane, `flush` is called, or someone waits for its result: the host decides that, in the same order on all
ranks, and no clock.

There is no deadlock. Each process group is used on one lane only, if first and last phases send through other groups
than those between them. In the order a₁ b₁ a₂ c₁ b₂ a₃ c₂ … every rank puts its work on the lanes, and all that work
waits for comes earlier in it. So the first of all work that has not ended has begun on all ranks, or can, and ends.
Other work begins when both lanes have done all that came before it.

A moment is seconds of `time.perf_counter`, or on CUDA an event in a stream, which is waited for only when its time is
read.

A lane keeps the memory of a flight's temporary tensors for the next flight. An allocator of CPU memory returns large
blocks to the system, and taking them again costs a page fault for every 4 KiB: filling 16 MiB for the first time took
3.6 ms, and again 0.7 ms (one thread of a virtual machine). CUDA's allocator keeps its blocks.
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
    """Return True if a moment has passed, so that `between` does not wait for it."""
    return isinstance(when, float) or bool(when.query())


def between(a: Moment, b: Moment) -> float:
    """Return the seconds from one moment to another of the same device. Waits until both have passed."""
    if isinstance(a, float):
        return float(b - a)
    for event in (a, b):
        event.synchronize()
    return float(a.elapsed_time(b)) / 1e3


def reader(device: torch.device) -> Callable[[Moment], float]:
    """Return a function from moments of a device to seconds of `time.perf_counter`; synchronises on CUDA.

    An event is read by its distance to one made now: CUDA gives distances in fp32 milliseconds, 8 µs apart at 100 s.
    """
    if device.type != "cuda":
        return float
    torch.cuda.synchronize(device)
    now = moment(device)
    now.synchronize()
    host = time.perf_counter()
    return lambda when: host - between(when, now)


Phases = Generator[Any, None, Any]
"""Work in phases, by turns for a lane and for the one beside it. It yields the tensors that the next phase reads."""


class Flight:
    """Work on a lane: `done()` queries it, `result()` waits for it. This one is a placeholder, which never ends."""

    on_device = False  # `result()` lets a stream wait, and not the host: the work may still be under way then
    launched: Moment = None
    phases: Sequence[tuple[Moment, Moment]] = ()  # the begin and end of each phase of its work
    waits: Sequence[tuple[Moment, Moment]] = ()  # and of the waits for it: one after the end ends before it begins
    value: Any = None  # the result; a flight may be kept for its times without that memory
    _error: BaseException | None = None

    @property
    def held(self) -> bool:
        """Return True if only the last phase is left, and not due yet."""
        return False

    def flush(self) -> None:
        """Let the last phase be due."""

    def done(self) -> bool:
        """Return True if the work has ended. Never waits."""
        return False

    def result(self) -> Any:
        """Return what the work returned, or raise what it raised. On CUDA the stream waits, and the host does not."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """End the flight with `error`, unless it is done."""
        self._error = error

    def over(self) -> bool:
        """Return True if all moments so far have passed, so that reading them waits for nothing."""
        return self.done()

    def seconds(self) -> tuple[float, float]:
        """Return the seconds of work on the lanes, and those for which training waited. Waits unless it is over."""
        return sum(between(*phase) for phase in self.phases), sum(max(0.0, between(*wait)) for wait in self.waits)


class Lane:
    """A queue of work that runs in order, beside the training loop."""

    def run(self, work: Callable[[], Any], name: str = "") -> Flight:
        """Put `work` on the lane, all phases if it has some; `name` is for profilers."""
        raise NotImplementedError

    def fly(self, work: Callable[[], Phases], name: str = "") -> Flight:
        """Put work in phases on this lane and the one beside it, by turns: see this module."""
        raise NotImplementedError

    def flush(self) -> None:
        """Let the last phase of the latest flight be due."""

    def follow(self, streams: Iterable[Any]) -> None:
        """Let work launched from now on wait for these streams, besides the current one."""

    def uses(self, value: Any) -> None:
        """Keep the memory of the tensors in `value`, made elsewhere, until work launched now has used it."""

    def rest(self, seconds: float) -> None:
        """Wait until the work under way has ended on the host, but no longer than `seconds`."""

    def here(self) -> bool:
        """Return True on the lane's own thread, if it has one."""
        return False

    def idle(self) -> bool:
        """Return False while a device has work that the host does not wait for."""
        return True

    def close(self, wait: bool = True) -> None:
        """Take no more work, and wait for the work under way; without `wait`, which may be stuck, return at once."""


NO_RANGE: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def in_profile(what: str, name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range for the active profiler: of a launch, of work on the lane, or of the wait for it.

    It is empty without a profiler or a name: a range costs microseconds. On CPU the work is on another thread, which
    `torch.profiler` records if it profiles all threads. A range is opened and closed on one thread: a flight may
    outlive a profiler, and with it the memory to which the range would write.
    """
    if not (name and profiler._is_profiler_enabled):
        return NO_RANGE
    return profiler.record_function(f"baguakit: {what} {name}" if what else f"baguakit: {name}")


New = Callable[[Tensor], Tensor]
"""Makes a tensor like another, contiguous and uninitialised."""


class _Memory(threading.local):
    kept: list[Tensor] | None = None  # bytes; None on threads that do not keep their temporaries until they end
    taken: int = 0


_memory = _Memory()


@contextlib.contextmanager
def temporaries() -> Iterator[New]:
    """Yield a function that makes tensors for use within this block only: `torch.sub(x, y, out=new(x))`."""
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
