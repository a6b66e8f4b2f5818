"""Live ranks, as the caller holds them."""

import contextlib
import linecache
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..arguments import real, truth, whole
from .crew import Call, Crew
from .launcher import launcher
from .serving import Work, pickler
from .showing import Screen

MOST_THREADS, MOST_SECONDS = 1 << 15, 1e8  # of torch; three years, beyond which clocks overflow


class RankError(RuntimeError):
    """A call failed on some ranks. `failures` has the reason of each; the message tells all of them."""

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        alike: dict[str, list[int]] = {}
        for rank, reason in failures.items():  # the first to fail comes first
            alike.setdefault(reason, []).append(rank)
        super().__init__("\n\n".join(f"{_names(ranks)}: {reason}" for reason, ranks in alike.items()))


def _names(ranks: list[int]) -> str:
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


class Ranks:
    """`size` ranks on this machine, each a process, that run the caller's functions. A context manager.

        with bk.Ranks(4) as ranks:
            ranks.run(train)

    The processes are made by the first call and live until `close()`, until this object is dropped, or until the
    caller's process ends, however it ends. Each is in torch's default process group, so that `bk.Comm()` is at hand,
    over gloo on the loopback, which no other machine reaches. They have the caller's folder, environment and
    `sys.path`, and none of its state: a script needs no `if __name__ == "__main__"`, and a notebook's functions are
    sent whole, with what they refer to.

    Args:
        size: the number of ranks.
        threads: that torch computes with, on each.
        cuda: let rank r use GPU r, and NCCL between GPUs. Where these are too few ranks share them, which is slow.
        timeout: seconds for which gloo waits for another rank; None means torch's own 30 minutes.

    Raises:
        ValueError, TypeError: a number makes no sense, or there is no GPU to use.
        OSError: processes cannot be forked here.
    """

    def __init__(self, size: int, *, threads: int = 1, cuda: bool = False, timeout: float | None = None) -> None:
        self.size, self.threads = whole("size", size, 1), whole("threads", threads, 1, MOST_THREADS)
        self.cuda, self.timeout = truth("cuda", cuda), seconds("timeout", timeout)
        if cuda and not torch.cuda.is_available():
            raise ValueError("cuda=True lets ranks use GPUs, and torch sees none here; leave it out")
        self._crew: Crew | None = None
        self._closed = False
        self._calls, self._lock = 0, threading.Lock()
        launcher()  # so that it imports torch meanwhile

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        keep: bool = False,
        limit: float | None = None,
        lost: Sequence[int] = (),
    ) -> list[Any]:
        """Call `function(*args)` on every rank, and return what it returns, by rank.

        What ranks print is shown as it comes, with the rank in front. If a rank raises, the others have two seconds to
        end as well. After an error, an interrupt or a loss all ranks are ended, and the next call makes new ones.

        Args:
            function: any function; closures, lambdas and functions of a notebook need cloudpickle.
            args: of the function, the same on all ranks.
            keep: call `function(kept, *args)`, `kept` being a dict that lives on the rank for as long as its process.
            limit: seconds after which the call is given up, each rank showing where it stands; None: never. They
                count from when the ranks have started to the end of their answers' arrival.
            lost: ranks that are expected to die of this call: None stands for what they return, and nobody waits.

        Raises:
            RankError: the function raised on some rank, or a rank died or was late; with the rank's own traceback.
            TypeError: the function cannot be sent, or an argument is of another type.
            ValueError: an argument is out of range.
            KeyboardInterrupt: the call was interrupted; the ranks have shown where they stood.
        """
        packed, limit = pack(function, args), seconds("limit", limit)
        truth("keep", keep)
        gone = {whole("a rank in lost", rank, 0, self.size - 1) for rank in ranks_of("lost", lost)}
        with self._lock:
            self._calls += 1
            call = Call(self._calls, set(range(self.size)) - gone)
            work = Work(self._calls, [str(path) for path in sys.path], unfiled_sources(), keep, packed)
            with contextlib.closing(Screen()) as screen:
                self._perform(work, call, screen, limit)
        if call.failures:
            raise RankError(call.failures)
        return [call.values.get(rank) for rank in range(self.size)]

    def _perform(self, work: Work, call: Call, screen: Screen, limit: float | None) -> None:
        well = False
        try:
            crew = self._living() or self._start(screen)
            try:
                crew.perform(work, call, screen, limit)
            except KeyboardInterrupt:
                crew.show_where(call)
                crew.finish(screen)
                raise
            well = len(call.values) == self.size
        finally:
            if not well:
                self.close()

    def close(self) -> None:
        """End the processes. A later call makes new ones; calling it again does nothing."""
        crew, self._crew, self._closed = self._crew, None, True
        if crew is not None:
            crew.finalize()

    def _living(self) -> Crew | None:
        if self._crew is not None and not self._crew.alive():
            self.close()
        return self._crew

    def _start(self, screen: Screen) -> Crew:
        self._crew = crew = Crew(self.size)
        self._closed = False
        crew.finalize = weakref.finalize(self, crew.close)
        crew.start(self.threads, self.cuda, self.timeout, screen)
        return crew

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Ranks({self.size}), closed: its processes have ended>" if self._closed else f"Ranks({self.size})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "it refers to the Ranks, which are not there; on a rank, bk.Comm().rank and bk.Comm().size say which it is"
        )


def seconds(name: str, value: Any) -> float | None:
    """Return a time in seconds, or None, which stands for no limit."""
    return None if value is None else real(name, value, above=0, most=MOST_SECONDS)


def ranks_of(name: str, value: Any) -> Sequence[Any]:
    """Return a sequence of ranks; TypeError for anything else."""
    if not isinstance(value, Collection) or isinstance(value, (str, bytes, torch.Tensor)):
        raise TypeError(f"{name} is a sequence of ranks, not {value!r}")
    return list(value)


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A call, pickled.

    Raises:
        TypeError: it cannot be.
    """
    if not callable(function):
        raise TypeError(f"run takes a function and its arguments, not {function!r}; leave out the parentheses")
    by = pickler()
    try:
        return bytes(by.dumps((function, args)))
    except Exception as error:
        missing = "" if by is not pickle else "; for closures and functions of a notebook install cloudpickle"
        raise TypeError(f"{function!r} cannot be sent to the ranks: {error}{missing}") from error


def unfiled_sources() -> dict[str, Any]:
    """Return the code in `linecache` that is in no file: the cells of a notebook. Tracebacks of ranks show it."""
    return {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
