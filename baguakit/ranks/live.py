"""The public class of live ranks."""

import contextlib
import linecache
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from ..arguments import integer, real, truth
from .launcher import Screen, launcher
from .processes import Call, Processes
from .serving import Work, dumps, takes_closures

if TYPE_CHECKING:
    from typing_extensions import TypeVarTuple, Unpack  # Python 3.10 has them there only

    Args = TypeVarTuple("Args")
T = TypeVar("T")
MOST_THREADS, MOST_SECONDS = 1 << 15, 1e8  # of torch; about three years: longer times may overflow clocks


class RankError(RuntimeError):
    """The failure of a call on some ranks. `failures` has the reason by rank; the message has all reasons."""

    __module__ = "baguakit"  # tracebacks show the public name

    def __init__(self, failures: dict[int, str]) -> None:
        self.failures = failures
        alike: dict[str, list[int]] = {}
        for rank, reason in failures.items():  # in the order of the failures
            alike.setdefault(reason, []).append(rank)
        super().__init__("\n\n".join(f"{_names(ranks)}: {reason}" for reason, ranks in alike.items()))


def _names(ranks: list[int]) -> str:
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, sorted(ranks)))}"


class Ranks:
    """Processes on this machine, one per rank, that run the caller's functions. A context manager.

        with bk.Ranks(4) as ranks:
            ranks.run(train)

    The first call starts the processes. They run until `close()`, until this object is deleted, or until the caller's
    process ends for any reason. They form torch's default process group, which `bk.Comm()` uses, over gloo on the
    loopback interface, which other machines cannot reach. They have the caller's working directory, environment and
    `sys.path`, but none of its variables: a script needs no `if __name__ == "__main__"`, and a function of a notebook
    is sent with the values that it refers to.

    Args:
        size: the number of ranks.
        threads: the number of torch's threads on each rank.
        cuda: let rank r use GPU r, and NCCL between GPUs. Ranks share GPUs if there are fewer, which is slow.
        timeout: the seconds that gloo waits for another rank; None for torch's default, 30 minutes.

    Raises:
        TypeError, ValueError: a number is impossible, or `cuda` is True and there is no GPU.
        OSError: the system cannot fork processes; from `run`, the ranks need more open files than a process may
            have.
    """

    def __init__(self, size: int, *, threads: int = 1, cuda: bool = False, timeout: float | None = None) -> None:
        self.size, self.threads = integer("size", size, 1), integer("threads", threads, 1, MOST_THREADS)
        self.cuda, self.timeout = truth("cuda", cuda), seconds("timeout", timeout)
        if cuda and not torch.cuda.is_available():
            raise ValueError("cuda=True lets ranks use GPUs, but torch finds none; leave it out")
        self._processes: Processes | None = None
        self._closed = False
        self._calls, self._lock = 0, threading.Lock()
        launcher()  # it imports torch while the caller goes on

    @overload
    def run(
        self,
        function: "Callable[[Unpack[Args]], T]",
        *args: "Unpack[Args]",
        keep: Literal[False] = ...,
        limit: float | None = ...,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        function: "Callable[[dict[str, Any], Unpack[Args]], T]",
        *args: "Unpack[Args]",
        keep: Literal[True],
        limit: float | None = ...,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        keep: bool = ...,
        limit: float | None = ...,
        lost: Sequence[int],
    ) -> list[T | None]: ...

    def run(  # type: ignore[misc]  # mypy compares *args: Any with a TypeVarTuple, and finds it narrower
        self,
        function: Callable[..., Any],
        *args: Any,
        keep: bool = False,
        limit: float | None = None,
        lost: Sequence[int] = (),
    ) -> list[Any]:
        """Call `function(*args)` on every rank, and return the results by rank.

        The output of ranks is printed at once, with the rank in front. If a rank raises, the others have two seconds to
        return. After an error, an interrupt or the end of a rank all processes end, and the next call starts new ones.

        Args:
            function: any function; closures, lambdas and functions of a notebook need cloudpickle.
            args: the arguments of the function, the same on all ranks.
            keep: call `function(kept, *args)`, where `kept` is a dict on the rank that lasts as long as its process.
            limit: the seconds after which the call fails and each rank prints its stack; None for no limit. The time
                begins when the ranks have started, and includes the transfer of the results.
            lost: ranks that are expected to die in this call: the call does not wait for them, and their result is
                None.

        Returns:
            The results of the function, by rank.

        Raises:
            RankError: the function raised on some rank, or a rank died or was late; with the traceback of the rank.
            TypeError: the function cannot be pickled, or an argument has another type.
            ValueError: an argument is out of range.
            KeyboardInterrupt: the call was interrupted; the ranks have printed their stacks.
        """
        packed, limit = pack(function, args), seconds("limit", limit)
        truth("keep", keep)
        if not isinstance(lost, Collection) or isinstance(lost, (str, bytes, torch.Tensor)):
            raise TypeError(f"lost is a sequence of ranks, not {lost!r}")
        gone = {integer("a rank in lost", rank, 0, self.size - 1) for rank in lost}
        with self._lock:
            self._calls += 1
            call = Call(self._calls, set(range(self.size)) - gone)
            # Code that is not in a file, such as notebook cells, for tracebacks of ranks.
            sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
            work = Work(self._calls, [str(path) for path in sys.path], sources, keep, packed)
            with contextlib.closing(Screen()) as screen:
                self._perform(work, call, screen, limit)
        if call.failures:
            raise RankError(call.failures)
        return [call.values.get(rank) for rank in range(self.size)]

    def _perform(self, work: Work, call: Call, screen: Screen, limit: float | None) -> None:
        succeeded = False
        try:
            processes = self._living() or self._start(screen)
            try:
                processes.perform(work, call, screen, limit)
            except KeyboardInterrupt:
                processes.show_stacks(call)
                processes.finish(screen)
                raise
            succeeded = len(call.values) == self.size
        finally:
            if not succeeded:
                self.close()

    def close(self) -> None:
        """End the processes. A later `run` starts new ones. Idempotent."""
        processes, self._processes, self._closed = self._processes, None, True
        if processes is not None:
            processes.finalize()

    def _living(self) -> Processes | None:
        if self._processes is not None and not self._processes.alive():
            self.close()
        return self._processes

    def _start(self, screen: Screen) -> Processes:
        self._processes = processes = Processes(self.size)
        self._closed = False
        processes.finalize = weakref.finalize(self, processes.close)
        processes.start(self.threads, self.cuda, self.timeout, screen)
        return processes

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Ranks({self.size}), closed: run() starts new processes>" if self._closed else f"Ranks({self.size})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "it refers to the Ranks, which do not exist on a rank; use bk.Comm().rank and bk.Comm().size there"
        )


def seconds(name: str, value: Any) -> float | None:
    """Return a time in seconds, or None for no limit."""
    return None if value is None else real(name, value, above=0, most=MOST_SECONDS)


def pack(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return a call, pickled.

    Raises:
        TypeError: the call cannot be pickled.
    """
    if not callable(function):
        raise TypeError(f"run takes a function and its arguments, not {function!r}; leave out the parentheses")
    try:
        return dumps((function, args))
    except Exception as error:
        missing = "" if takes_closures() else "; for closures and functions of a notebook install cloudpickle"
        raise TypeError(f"{function!r} cannot be sent to the ranks: {error}{missing}") from error
