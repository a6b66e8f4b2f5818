"""The monitor: it names the rank at fault when a flight does not arrive.

Each rank writes a record to the store. When a flight is late or fails, one of the waiting ranks reads all records and
publishes which rank is at fault. With every heartbeat a rank compares its launches with those of another rank, so that
ranks that have diverged do not continue to train.

When a process with attachments exits, it tells the other ranks, and ends the threads of its monitors, because a thread
would abort the process if it returned from a call of torch while the interpreter exits. The other ranks read in the
store why a rank has left. The store may end with rank 0, so rank 0 waits a few seconds until the others have left.
"""

import atexit
import contextlib
import os
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from .judging import first_line, store_gone
from .records import GAVE_UP, LEFT, RAISED, Air, Collective, LaunchCount
from .watching import Watch

POLL = 0.0005  # seconds between the first two queries of the store
PAUSE = 0.0001  # seconds between two looks at work on a GPU
SHARE = 1 / 8  # of the time that a rank has waited already: the pause before the next query, at most a heartbeat


class PeerError(RuntimeError):
    """A rank is dead or late, has left, or has raised an error. The message names the rank."""

    __module__ = "baguakit"  # tracebacks show the public name


class Fault:
    """A number in pinned memory, one for each dtype: 1 until `set` is called, then NaN; for bool, True and then False.

    An abort ends the kernels of a flight before all data have come. Optimizer steps that the host has queued already
    would then apply an unfinished sum. So `set` is called before the abort, and the device reads the number after the
    flight. Gradients are multiplied by the number, so that NaN in every parameter shows a lost step.
    """

    def __init__(self) -> None:
        self._is_set, self._numbers = False, dict[torch.dtype, Tensor]()

    def set(self) -> None:
        """Mark as lost all flights that land from now on."""
        self._is_set = True
        for number in list(self._numbers.values()):
            number.fill_(torch.nan if number.is_floating_point() else 0)

    def multiply_(self, heads: Sequence[Tensor]) -> None:
        """Multiply tensors of one dtype and device by 1, or after `set` by NaN; about 100 tensors per kernel."""
        torch._foreach_mul_(list(heads), self._on(heads[0].device, heads[0].dtype))

    def good(self, device: torch.device) -> Tensor:
        """Return a bool tensor on `device`: False if flights on the device are lost. The host does not wait."""
        return self._on(device, torch.bool)

    def _on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        if dtype not in self._numbers:
            number = torch.ones((), dtype=dtype)
            self._numbers[dtype] = number.pin_memory() if device.type == "cuda" else number
            if self._is_set:  # meanwhile, by another thread
                self.set()
        return self._numbers[dtype].to(device, non_blocking=True)


class Monitor:
    """The monitor of the flights of one attachment on one rank. With one rank there is nothing to watch.

    `store` is the attachment's part of the key-value store, or None with one rank; `timeout` is the age at which a
    flight fails; `abort` aborts all work in the attachment's groups, without waiting; `broken` returns the network
    error that these groups have recorded, or "".
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, abort: Callable[[], None], broken: Any = str
    ) -> None:
        self.store, self.rank, self.size, self.abort, self.broken = store, rank, size, abort, broken
        self.run = uuid.uuid4().hex[:12]  # no other attachment has it; once started, the same on all ranks
        self.device = torch.device("cpu")  # that of the flights, once the ranks have agreed on a setup
        self.limit: Callable[[], timedelta] = lambda: timeout  # replaced if the timeout may change
        self.beat = min(1.0, self.timeout / 10)
        self.silence = 4 * self.beat
        self.error: PeerError | None = None
        self.hasty = False  # a connection error ends all flights at once; the rank at fault is found later
        self.failed: Callable[[str], None] = lambda sentence: None  # called by `fail`
        self.leaving: tuple[str, str] = ("", "")  # how and why this rank has left; "" before
        self.working_on = ""  # work that may take long
        self.air = Air()
        self.launched = self.air.launch  # called when a collective is put on a lane
        self.fault: Fault | None = None  # marks lost flights, if an abort may end them unfinished
        self.watch = Watch(self)
        self._lock, self._ended = threading.Lock(), threading.Event()

    @property
    def timeout(self) -> float:
        """The age at which a flight fails, in seconds."""
        return self.limit().total_seconds()

    @property
    def patience(self) -> float:
        """The seconds after which a silent rank counts as dead. They allow for a busy CPU, compiling and saving."""
        return max(4 * self.beat, min(60.0, self.timeout / 4))

    @property
    def inquiry(self) -> float:
        """The seconds that a search for the rank at fault may take."""
        return min(self.timeout, 6 * self.beat + 1)

    # The attachment calls these methods.

    def start(self) -> None:
        """Write the first record and start the threads. Call this before any collective."""
        if self.size > 1:
            self.watch.start()

    def fly_on(self, device: torch.device) -> None:
        """Set the device of flights; on a GPU make the `Fault`, unless the host waits for each flight (`hasty`)."""
        self.device = device
        self.fault = Fault() if device.type == "cuda" and self.size > 1 and not self.hasty else None

    def wait_for(self, collective: Collective) -> Any:
        """Wait for a collective and return its result, or raise an error that names the rank at fault.

        If the ranks of the group may change, the host also waits until a GPU has finished the work. An aborted kernel
        seems to be finished, but `fail` sets the error before the abort, so that no result is used.
        """
        if self.error is not None:  # `fail` may have looked too early to see this flight, or ended a placeholder
            collective.flight.fail(self.error)
        if self.hasty:
            collective.flight.flush()
        while self.hasty and collective.flight.on_device and not collective.flight.done():
            time.sleep(PAUSE)
        try:
            return collective.flight.result()
        except Exception as error:
            found = self._explained(error, collective)
            raise found from found.__cause__
        finally:
            collective.landed = True

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Suspend the timeouts of the other ranks during a `with` block that may take long. `what` names its work."""
        self.working_on = what
        if self.size > 1:
            try:
                self.watch.write()
            except Exception as error:
                raise self.fail(store_gone(self.rank, error)) from None
        try:
            yield
        finally:
            self.working_on = ""

    def check(self) -> None:
        """Raise the error that the monitor has found, if any."""
        if self.error is not None:
            raise _again(self.error)

    def barrier(self, lane: int, launches: LaunchCount) -> None:
        """Wait until all ranks have made the same launches on a lane, or raise a PeerError."""
        if self.size > 1:
            key = f"meet/{lane}/{launches.number}/{launches.digest}"
            self.store.add(key, 1)
            self.wait_until(lambda: int(self.store.add(key, 0)) >= self.size)

    def wait_until(self, there: Callable[[], bool]) -> None:
        """Call `there()`, less and less often, until it is true. Raise the error that the monitor has found, if any."""
        began = time.monotonic()
        while not there():
            self.check()
            pause = min(max(POLL, SHARE * (time.monotonic() - began)), self.beat)
            if self._ended.wait(pause):
                self.check()
                raise PeerError(f"rank {self.rank} has detached")

    def _explained(self, error: Exception, collective: Collective) -> Exception:
        """Return the exception to raise for a failed collective: it names the rank at fault if one can be found."""
        if self.error is not None or self.size == 1:
            return _again(self.error) if self.error else error
        cause = _from_network(error)
        if cause is None:  # the stage's own
            said = f"{type(error).__name__}: {error}"
        elif self.hasty:
            said = first_line(cause).rpartition("] ")[2].partition(". ")[0]  # gloo's, without its place and advice
        else:
            self.air.failed(collective)
            self.watch.wake.set()
            self._ended.wait(self.inquiry)
            if self.error is not None:
                return self.error
            said = str(cause)
        own = self.fail(f"{collective.label} failed on rank {self.rank}: {said}")
        own.__cause__ = error
        return own

    def compare(self, *ranks: int, sure: bool = False) -> None:
        """Compare this rank's launches with those of `ranks`; call `fail` if they differ. `sure`: see `diverged`."""
        if self.size > 1 and self.error is None:
            with contextlib.suppress(RuntimeError):  # the store went with its host: there is nothing to compare with
                self.watch.compare(self.watch.board.glance({r % self.size for r in ranks})[1], sure)

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the other ranks that this rank leaves, because of `error` if it is given; wait for none of them."""
        self.leaving = (LEFT, "") if error is None else (RAISED, f"{type(error).__name__}: {error}")
        if self.error is not None:
            self.leaving = (GAVE_UP, str(self.error))
        self._ended.set()
        if self.watch.end():
            with contextlib.suppress(Exception):  # the store died with its host: nobody is left to read this
                self.watch.write()

    def alone(self) -> bool:
        """Return True if all other ranks have left, or the store is gone."""
        try:
            _, others = self.watch.board.glance(range(self.size))
            return len(others) == self.size - 1 and all(record.how for record in others.values())
        except Exception:  # it died with its host
            return True

    def fail(self, sentence: str) -> PeerError:
        """End all flights with a PeerError, and return the error. Later calls keep the first sentence."""
        with self._lock:
            self.error = self.error or PeerError(sentence)  # before the look: later flights see it themselves
        for collective in self.air.all():
            collective.flight.fail(self.error)
        self._ended.set()
        if self.fault is not None:
            self.fault.set()
        if self.device.type == "cuda":  # the host may be blocked in CUDA, where no hook comes to raise it
            print(f"baguakit: {self.error}", file=sys.stderr, flush=True)
        self.abort()
        self.failed(str(self.error))
        return self.error


def _again(error: PeerError) -> PeerError:
    """Return a copy of an error, so that it is raised again with a new traceback."""
    new = PeerError(*error.args)
    new.__cause__ = error.__cause__
    return new


def _from_network(error: BaseException) -> RuntimeError | None:
    """Return the deepest RuntimeError among the causes of `error`, or None. Groups and stores raise RuntimeErrors."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    return next((each for each in reversed(chain) if isinstance(each, RuntimeError)), None)


_monitors: "weakref.WeakKeyDictionary[Monitor, int]" = weakref.WeakKeyDictionary()  # with the process of each


def end_with_process(monitor: Monitor) -> None:
    """End a monitor when this process ends, if it has not ended by then."""
    _monitors[monitor] = os.getpid()


@atexit.register
def end_all() -> None:
    """End all monitors of this process. Rank 0 then waits a few seconds for the other ranks to leave."""
    monitors = [monitor for monitor, process in list(_monitors.items()) if process == os.getpid()]
    for monitor in monitors:
        if not monitor.leaving[0]:
            monitor.leave(getattr(sys, "last_value", None))  # the process ends for that
    for monitor in monitors:
        until = time.monotonic() + monitor.silence
        while monitor.rank == 0 and not monitor.alone() and time.monotonic() < until:
            time.sleep(monitor.beat / 4)
