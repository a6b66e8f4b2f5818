"""The processes of an experiment: started, killed, and heard."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from bench.netlab import Lab

from . import torchft_peer, trainer

context = multiprocessing.get_context("forkserver")


@dataclass
class Trainee:
    """A process that trains, and what it has said.

    Attributes:
        host: its host.
        process, end: the process, and this side of its pipe.
        began: its first line of Python, in seconds of `time.time`, as are all times here.
        steps: when it had made a step, the number of the step, and how many ranks there were.
        changes: when the group had changed, the step, and the digest of its weights.
        discarded: when it had made a step that did not count, since the group had changed.
        weights: its latest, if it has been asked.
        samples: files of weights, each with the moment in which it had been written.
        waiting: its steps since it last contributed to a round that does not wait.
        ended: when it was killed; None if it lives.
    """

    host: int
    process: Any
    end: Any
    began: float = 0.0
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    changes: list[tuple[float, int, str]] = field(default_factory=list)
    discarded: list[float] = field(default_factory=list)
    weights: Any = None
    samples: list[tuple[float, Path]] = field(default_factory=list)
    waiting: int = 0
    ended: float | None = None

    def hear(self) -> None:
        """Note all it has said."""
        try:
            while self.end.poll():
                self._note(*self.end.recv())
        except (EOFError, ConnectionError):
            if self.ended is None:
                raise RuntimeError(f"the rank on host {self.host} has ended by itself") from None

    def _note(self, word: str, at: float, *said: Any) -> None:
        if word == "begins":
            self.began = at
        elif word == "step":
            self.steps.append((at, *said))
        elif word == "change":
            self.changes.append((at, *said))
        elif word == "waiting":
            self.waiting = said[0]
        elif word == "discarded":
            self.discarded.append(at)
        elif word == "weights":
            self.weights = said[0]
        elif word == "sample":
            self.samples.append((at, said[0]))

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, number)


class Crew:
    """One process that trains on each host of a laboratory but the last, where the store is. A context manager."""

    def __init__(self, lab: Lab, cell: Mapping[str, Any]) -> None:
        preload()
        self.lab, self.cell, self.all = lab, cell, list[Trainee]()
        self.store = lab.hosts - 1
        address, self.ours = lab.wires.address(self.store), cell["algorithm"] != torchft_peer.NAME
        self.endpoint = f"{address}:29400"
        keep_store = trainer.keep_store if self.ours else torchft_peer.keep_store
        self._store = context.Process(target=keep_store, args=(lab.namespace(self.store), address))
        self._store.start()
        for host in range(self.store):
            self.start(host)

    def __enter__(self) -> "Crew":
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.present():
            self.kill(each)
        self._store.kill()
        self._store.join()

    def present(self) -> list[Trainee]:
        """Return those that have not been killed."""
        return [each for each in self.all if each.ended is None]

    def start(self, host: int) -> Trainee:
        """Start a process on a host."""
        here, there = context.Pipe()
        words = (
            there,
            self.lab.namespace(host),
            self.lab.environment(host),
            self.endpoint,
            {**self.cell, "host": host},
        )
        process = context.Process(target=trainer.train if self.ours else torchft_peer.train, args=words)
        process.start()
        there.close()
        self.all.append(Trainee(host, process, here))
        return self.all[-1]

    def kill(self, one: Trainee) -> None:
        """End one at once."""
        one.ended = time.time()
        one.signal(signal.SIGKILL)
        one.process.join()
        one.hear()

    def hear(self, seconds: float) -> None:
        """Note what is said within so many seconds, or until the first of it."""
        ends = [each.end for each in self.present()]
        if connection.wait(ends, seconds):
            for each in self.present():
                each.hear()

    def hear_until(self, true: Any, seconds: float, what: str) -> None:
        """Note what is said until something is true.

        Raises:
            TimeoutError: it is not within so many seconds.
        """
        until = time.time() + seconds
        while not true():
            if time.time() > until:
                raise TimeoutError(f"{what}: not within {seconds:g} s")
            self.hear(0.1)


def preload() -> None:
    """Start the process from which all others are forked; before Python 3.14 it does not take over `sys.path`."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    context.set_forkserver_preload([trainer.__name__, torchft_peer.__name__])
    forkserver.ensure_running()
