"""Many monitors in one process, each with a connection of its own to a store in another process."""

import multiprocessing
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from baguakit.lanes import Flight
from baguakit.monitor import Collective, Monitor
from baguakit.runtime.agreement import agree

TIMEOUT = 60.0  # seconds
REQUESTS = ("set", "get", "add", "append", "check", "compare_set", "multi_get", "delete_key")
LINES = 1000  # of the setup of a rank, of 40 bytes each: a model of a thousand parameters


class Endless(Flight):
    """A flight that does not arrive."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over

    def fail(self, error: Exception) -> None:
        self.over = True


class Line:
    """A connection to the store that counts requests and times them, makes them `slower`, and can be cut."""

    def __init__(self, store: Any, slower: float) -> None:
        self.store, self.slower, self.cut = store, slower, False
        self.requests: Counter[str] = Counter()
        self.seconds: list[float] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in REQUESTS:
            raise AttributeError(name)
        request = getattr(self.store, name)

        def made(*arguments: Any) -> Any:
            if self.cut:
                raise RuntimeError("this line is cut")
            self.requests[name] += 1
            began = time.perf_counter()
            answer = request(*arguments)
            time.sleep((self.slower - 1) * (time.perf_counter() - began))
            self.seconds.append(time.perf_counter() - began)
            return answer

        return made


@dataclass(frozen=True)
class Lines:
    """The part of a setup on which ranks agree."""

    lines: list[str]
    device: torch.device
    kinds: tuple[str, ...] = ()


class Crowd:
    """The monitors of `size` ranks, with their lines to the store.

    Attributes:
        named: the time at which each rank that has given up did so, by rank.
    """

    def __init__(self, size: int, port: int, slower: float) -> None:
        self.named: dict[int, float] = {}
        self.lines = [Line(connection(port), slower) for _ in range(size)]
        limit = timedelta(seconds=TIMEOUT if slower == 1 else 600)
        self.monitors = [Monitor(line, rank, size, limit, lambda: None) for rank, line in enumerate(self.lines)]
        for rank, monitor in enumerate(self.monitors):
            monitor.failed = lambda said, rank=rank: self.named.setdefault(rank, time.monotonic())  # type: ignore[misc]

    def start(self) -> None:
        """Start all monitors within a second, and let all ranks wait for a flight from now on."""
        for monitor in self.monitors:
            monitor.start()
            time.sleep(1 / len(self.monitors))
        for monitor in self.monitors:
            monitor.launched(0, Collective(label="a flight", flight=Endless()))
        time.sleep(4)  # a flight is waited for after two heartbeats

    def agree(self) -> list[float]:
        """Let all ranks agree on a setup at the same time; return the seconds that each took."""
        setup = [f"parameter {i} (1024, 1024) float32 trainable" for i in range(LINES)]
        taken = [0.0] * len(self.monitors)
        together = threading.Barrier(len(self.monitors))

        def run(rank: int) -> None:
            together.wait()
            began = time.perf_counter()
            made: Any = Lines(setup, torch.device("cpu"))
            agree(self.monitors[rank], lambda: made)
            taken[rank] = time.perf_counter() - began

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.monitors))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return taken

    def judge(self) -> int:
        """Return the rank that judges."""
        leases = Counter(monitor.watch._lease.rank for monitor in self.monitors)
        return leases.most_common(1)[0][0]

    def forget(self) -> None:
        """Count from now on."""
        for line in self.lines:
            line.requests, line.seconds = Counter(), []

    def rates(self, seconds: float) -> dict[str, Any]:
        """Count for so long; return the requests a second: of most ranks, of the judge, and of all."""
        self.forget()
        taken = 0.0
        while taken < seconds:
            began = time.monotonic()
            time.sleep(1)
            taken += min(2.0, time.monotonic() - began)  # what this process was stopped for does not count
        judge = self.judge()
        counts = [line.requests.total() / taken for line in self.lines]
        waited = sorted(each for line in self.lines for each in line.seconds)
        others = [rate for rank, rate in enumerate(counts) if rank != judge]
        return {
            "seconds": taken,
            "each": statistics.mean(others),
            "most": max(others),
            "judge": counts[judge],
            "all": sum(counts),
            "request_median": statistics.median(waited),
            "request_99": waited[int(0.99 * len(waited))],
        }

    def lose(self, rank: int) -> list[float]:
        """Cut a rank off, and wait until all others know; return after how many seconds each did.

        Raises:
            RuntimeError: they do not name that rank.
        """
        self.lines[rank].cut = True
        began = time.monotonic()
        others = [monitor for monitor in self.monitors if monitor.rank != rank]
        while not all(monitor.error for monitor in others) and time.monotonic() - began < TIMEOUT:
            time.sleep(0.05)
        wrong = [str(each.error) for each in others if not str(each.error).startswith(f"rank {rank} is dead")]
        if wrong:
            raise RuntimeError(f"rank {rank} was cut off, and {len(wrong)} ranks said: {wrong[0]}")
        return sorted(at - began for each, at in self.named.items() if each != rank)


def connection(port: int) -> Any:
    """Return a new connection to the store."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))


@contextmanager
def crowd(size: int, slower: float = 1.0) -> Iterator[Crowd]:
    """Return a crowd with a store of its own, which ends with the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    made = Crowd(size, ours.recv(), slower)
    try:
        yield made
    finally:
        for monitor in made.monitors:
            monitor.watch.over.set()
            monitor.watch.wake.set()
        for monitor in made.monitors:
            monitor.watch.end()
        ours.close()
        server.join()


def serve(caller: Any) -> None:
    """Hold a store until the caller's process ends or closes the pipe."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    caller.send(store.port)
    try:
        caller.recv()
    except EOFError:
        del store
