"""The processes of a laboratory: one for each host, watched until the last has ended or one has failed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

GRACE = 3.0  # seconds between asking a process to end and ending it
LOOK = 0.05


@dataclass(frozen=True)
class Ended:
    """The outcome of a command.

    Attributes:
        status: the worst of those that ended by themselves; a process killed by signal s counts as 128 + s, and 124
            says that time ran out.
        statuses: by host; of those that had to be stopped, too.
        outputs: what each printed, stderr included.
    """

    status: int
    statuses: tuple[int, ...]
    outputs: tuple[str, ...]


class Ranks:
    """A command under way on all hosts. Made by `Lab.start`."""

    def __init__(
        self, commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]], echo: TextIO | None
    ) -> None:
        self._echo, self._lock = echo, threading.Lock()
        self.lines: list[list[str]] = [[] for _ in commands]  # what each has printed so far
        self.processes: list[subprocess.Popen[str]] = []
        try:
            for command, environment in zip(commands, environments, strict=True):
                self.processes.append(_start(command, environment))
        except BaseException:
            self.stop()
            raise
        self._readers = [
            threading.Thread(target=self._read, args=(host, process), daemon=True)
            for host, process in enumerate(self.processes)
        ]
        for reader in self._readers:
            reader.start()

    def wait(self, timeout: float | None = None, keep_going: bool = False) -> Ended:
        """Wait until all have ended; when one fails, or time runs out, stop the others.

        Args:
            timeout: seconds; None waits for ever.
            keep_going: leave the others alone when one fails.
        """
        until = None if timeout is None else time.monotonic() + timeout
        late = False
        try:
            while not self.over(keep_going) and not late:
                time.sleep(LOOK)
                late = until is not None and time.monotonic() > until
            statuses = [_status(process.poll()) for process in self.processes]
        finally:
            self.stop()
        own = [124] * late + [status for status in statuses if status is not None]
        final = tuple(_status(process.returncode) or 0 for process in self.processes)
        return Ended(max(own), final, tuple("".join(lines) for lines in self.lines))

    def over(self, keep_going: bool = False) -> bool:
        """Return whether all have ended, or one has failed and the others are not to go on without it."""
        statuses = [process.poll() for process in self.processes]
        return None not in statuses or (any(statuses) and not keep_going)

    def stop(self) -> None:
        """End whatever still runs, and read what it printed last."""
        running = [process for process in self.processes if process.poll() is None]
        for process in running:
            _signal(process, signal.SIGTERM)
            _signal(process, signal.SIGCONT)
        until = time.monotonic() + GRACE
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self.processes:  # of one that ended by itself, what it left behind
            _signal(process, signal.SIGKILL)
            process.wait()
        for reader in getattr(self, "_readers", []):
            reader.join(GRACE)

    def _read(self, host: int, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as printed:
            for line in printed:
                self.lines[host].append(line)
                if self._echo is not None:
                    with self._lock:
                        print(f"[{host}]", line.removesuffix("\n"), file=self._echo, flush=True)


class Hosts:
    """Hosts on which a command can be started, and so be run."""

    def start(
        self,
        command: Sequence[str] | Callable[[int], Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
        echo: TextIO | None = None,
    ) -> Ranks:
        """Start a command on every host; `.wait()` for it."""
        raise NotImplementedError

    def run(
        self,
        command: Sequence[str] | Callable[[int], Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        keep_going: bool = False,
        echo: TextIO | None = None,
    ) -> Ended:
        """Run a command on every host and wait for it; when it fails on one, the others are stopped.

        Args:
            command: the words of a command, or a function from the host's number to them.
            env: set beside RANK, WORLD_SIZE and so on.
            timeout: seconds after which all are stopped, with status 124; None: never.
            keep_going: leave the others alone when one fails.
            echo: where to write what is printed, as it comes, each line with its host: `sys.stdout`, or None.
        """
        return self.start(command, env=env, echo=echo).wait(timeout, keep_going)


def _start(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # ctrl-C ends the laboratory, and that ends them
    )


def _signal(process: "subprocess.Popen[str]", number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _status(code: int | None) -> int | None:
    return code if code is None or code >= 0 else 128 - code


def say(text: str) -> None:
    """A line about a laboratory, apart from what the command prints."""
    print(f"netlab: {text}", file=sys.stderr, flush=True)
