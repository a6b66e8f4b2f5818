"""The work object that a collective returns; it raises errors that name the rank at fault."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..lanes import Flight, Lane
from ..monitor import Collective, Monitor


class Passed(Flight):
    """A flight that ends with `works`, works of the inner group, or with the works that the flight `launch` returns."""

    def __init__(self, works: Sequence[Any] = (), launch: Flight | None = None) -> None:
        self._works, self._launch = [work for work in works if work is not None], launch

    @property
    def works(self) -> Sequence[Any]:
        return self._works if self._launch is None else self._launch.result()

    def done(self) -> bool:
        if self._launch is not None and not self._launch.done():
            return False
        failed = self._error or (self._launch and self._launch._error)
        return failed is not None or all(work.is_completed() for work in self.works)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        if self._launch is not None:
            self._launch.fail(error)

    def follow(self) -> None:
        """Make the current stream wait for NCCL's futures: `wait()` would drop NCCL's references to the tensors."""
        for work in self.works:
            work.get_future().wait()

    def result(self) -> None:
        for work in self.works:
            if self._error is None:
                work.wait()
        if self._error is not None:
            raise self._error


class Work(dist.Work):
    """The work of a collective that has been launched.

    C++ may still use a work that Python has dropped, as DDP does in `join`, and would wait forever if it were deleted.
    So a group keeps, in `dropped`, the latest works that were dropped without a wait. The lane `follower` waits for the
    work, and runs the callbacks of its future, which may wait for other collectives. If it is None, torch runs the
    callbacks when the inner group's works end.
    """

    def __init__(
        self, collective: Collective, monitor: Monitor, outs: Any, follower: Lane | None, dropped: "deque[Work]"
    ) -> None:
        super().__init__()
        self._collective, self._monitor, self._outs, self._follower = collective, monitor, list(outs), follower
        self._landing = Landing((), ())
        self._followed = False  # whether a wait or a future follows it; a future outlives this object
        self._dropped = dropped

    def __del__(self) -> None:
        if not self._followed:
            self._collective.landed = True
            self._dropped.append(self)

    def lands(self, outs: Sequence[Tensor], hosts: Sequence[Tensor]) -> "Work":
        """Return this work, which from now on ends with copies of `hosts`, its results on the CPU, to `outs`."""
        self._outs, self._landing = list(outs), Landing(outs, hosts)
        return self

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the work has ended, and raise its error, if any. On CUDA only the current stream waits.

        With a `timeout` that is not 0, the host waits; after this time it raises a RuntimeError, and the work goes on.
        """
        until = time.monotonic() + timeout.total_seconds()
        while timeout > timedelta(0) and not self.is_completed():
            if time.monotonic() > until:
                raise RuntimeError(f"{self._collective.label} has not ended within the {timeout} of wait(); it goes on")
            time.sleep(0.0005)
        self._followed = True
        self._monitor.wait_for(self._collective)
        self._landing.land()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._collective.flight.done()

    def result(self) -> list[Tensor]:
        return self._outs

    def _source_rank(self) -> int:
        flight = self._collective.flight
        return int(flight.works[0]._source_rank()) if isinstance(flight, Passed) else -1

    def get_future(self) -> Any:
        """Return a future of the result tensors. DDP waits for this future and not for the work."""
        self._followed, collective, monitor, outs = True, self._collective, self._monitor, self._outs
        landing = self._landing
        future: Any = torch.futures.Future(devices=[x.device for x in outs[:1] if x.is_cuda])

        def deliver() -> None:
            try:
                monitor.wait_for(collective)
                landing.land()
                future.set_result(outs)
            except Exception as error:
                future.set_result(error)

        def ended(parts: Any) -> None:
            collective.flight = Passed()  # the work itself would wait for this callback
            try:
                parts.value()
            except Exception as error:
                collective.flight.fail(error)
            deliver()

        def value(delivered: Any) -> list[Tensor]:
            """Return the tensors, or raise the error, since C++ notices only errors that a callback raises."""
            if isinstance(found := delivered.value(), Exception):
                raise found
            return outs

        if self._follower is None:
            assert isinstance(collective.flight, Passed)
            torch.futures.collect_all([work.get_future() for work in collective.flight.works]).then(ended)
        elif collective.flight.done() or self._follower.here():  # C++ may read the value at once
            deliver()
        else:
            self._follower.run(deliver)
        return future.then(value)


class Landing:
    """Copies of tensors on the CPU to another device, which are made once, by whoever waits for the work first."""

    def __init__(self, outs: Sequence[Tensor], hosts: Sequence[Tensor]) -> None:
        self._pairs, self._lock = list(zip(outs, hosts, strict=True)), threading.Lock()

    def land(self) -> None:
        with self._lock:
            while self._pairs:
                out, host = self._pairs.pop()
                out.copy_(host)  # the host waits: afterwards any stream may read
