"""A laboratory: made when entered, gone when left, however that comes about."""

import functools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TextIO

from baguakit.compare.pacing import bits_per_second

from . import distance, owners
from .commands import batch, run
from .counters import Counters, of_namespace
from .distance import Way
from .pacing import Pacer, residents
from .ranks import Hosts, Ranks, say
from .wires import LINK, Wires, build, host_name, in_frames, shape

PORT = 29500  # every laboratory has all ports to itself


@functools.cache
def obstacle() -> str | None:
    """Why this process cannot have a laboratory, in a sentence; None if it can."""
    if sys.platform != "linux":
        return f"a network laboratory is made of Linux network namespaces, which {sys.platform} has not"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    if missing:
        return f"a network laboratory needs the command {missing[0]}, of Debian's package iproute2"
    if os.geteuid() != 0:
        return f"a network laboratory needs root, for namespaces and queues, and this is user {os.geteuid()}: use sudo"
    probe = owners.new_prefix()
    try:
        run("ip", "netns", "add", f"{probe}.probe")
        batch("ip", f"{probe}.probe", ["link add one type veth peer name two"])
        batch("tc", f"{probe}.probe", ["qdisc add dev one root tbf rate 1mbit burst 32kb latency 50ms"])
    except RuntimeError as error:
        return f"a network laboratory needs namespaces, veth and tbf, and this machine refuses them: {error}"
    finally:
        owners.remove(probe)
    return None


class Lab(Hosts):
    """Hosts whose links are shaped; see the figure in `bench.netlab`. A context manager.

    Args:
        hosts: how many, 1 to 250.
        rate: of each host's link, each way, such as "500mbit"; None leaves it unshaped.
        nodes: divide the hosts, in order, into so many nodes with switches of their own; it must divide `hosts`.
        between: the rate of each node's way to the others, which its hosts share.
        flow_cap: a rate that no single TCP connection exceeds.
        delay: from one node to another, or from one host to another without nodes, such as "25ms"; or a pair of them,
            to later nodes and to earlier ones. A round trip takes both.
        jitter: each frame is later by up to so much, and passes none; with `delay`.
        loss: the share of frames between nodes that are lost; with `delay`.

    Raises:
        ValueError: an argument makes no sense.
        PermissionError: this process cannot have a laboratory; says why.
    """

    def __init__(
        self,
        hosts: int,
        rate: str | None = None,
        *,
        nodes: int | None = None,
        between: str | None = None,
        flow_cap: str | None = None,
        delay: str | tuple[str, str] | None = None,
        jitter: str = "0ms",
        loss: float = 0.0,
    ) -> None:
        if delay is None and (loss or jitter != "0ms"):
            raise ValueError(
                'jitter= and loss= are of the way between nodes, which there is with delay=, such as "0ms"'
            )
        self.wires = Wires(hosts, rate, nodes, between, far=delay is not None)
        self.way = distance.way(delay or "0ms", jitter, loss)
        self._cap = None if flow_cap is None else bits_per_second(flow_cap) / 8
        self._prefix = ""
        self._undertaker: subprocess.Popen[bytes] | None = None
        self._pacer: Pacer | None = None
        self._core: subprocess.Popen[bytes] | None = None  # the process in which frames wait
        self._running: list[Ranks] = []

    # Its life

    def __enter__(self) -> "Lab":
        if reason := obstacle():
            raise PermissionError(reason)
        for left in owners.sweep():
            say(f"removed {left}, whose owner is gone")
        self._prefix = owners.new_prefix()
        self._undertaker = owners.undertaker(self._prefix)
        try:
            build(self.wires, self._prefix)
            if self.wires.far:
                self._core = self._middle()
                self.set_way(self.way)
            if self._cap is not None:
                self._pacer = Pacer([owners.FOLDER / self._name(host) for host in range(self.hosts)], self._cap)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop what runs and remove the hosts. Calling it again does nothing."""
        if self._pacer is not None:
            self._pacer.close()
            self._pacer = None
        if self._core is not None:
            with self._core:  # which closes its stdin, and waits for it
                self._core = None
        if self._undertaker is not None:
            assert self._undertaker.stdin is not None
            self._undertaker.stdin.close()
            self._undertaker.wait()
            self._undertaker = None
        for ranks in self._running:
            ranks.stop()
        self._running.clear()

    # Running commands, with `run` of `Hosts`

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return self.wires.hosts

    def start(
        self,
        command: Sequence[str] | Callable[[int], Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
        echo: TextIO | None = None,
    ) -> Ranks:
        """Start a command on every host; `.wait()` for it, and meanwhile do to the network what one likes."""
        commands = [list(command(h) if callable(command) else command) for h in range(self.hosts)]
        inside = [["ip", "netns", "exec", self._name(h), *words] for h, words in enumerate(commands)]
        ranks = Ranks(inside, [{**self.environment(h), **(env or {})} for h in range(self.hosts)], echo)
        self._running.append(ranks)
        return ranks

    def environment(self, host: int) -> dict[str, str]:
        """Return the variables that `torchrun` would set for one rank a host; those of a node are local ranks."""
        return {
            "RANK": str(host),
            "WORLD_SIZE": str(self.hosts),
            "LOCAL_RANK": str(host % self.wires.per_node),
            "LOCAL_WORLD_SIZE": str(self.wires.per_node),
            "MASTER_ADDR": self.wires.address(0),
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": LINK,
            "NCCL_SOCKET_IFNAME": LINK,
        }

    def namespace(self, host: int) -> Path:
        """Return the file of a host's network namespace, for `setns`."""
        return owners.FOLDER / self._name(self._checked(host))

    # Looking at the network, and meddling with it

    def bytes(self) -> list[Counters]:
        """Return the counters of each host's link."""
        return [of_namespace(self._name(host), LINK) for host in range(self.hosts)]

    def set_rate(self, host: int, rate: str | None) -> None:
        """Change the rate of a host's link, each way, while connections go on; None takes the limit away."""
        shape(self._prefix, self._checked(host), rate)

    def unplug(self, host: int) -> None:
        """Switch a host's link off: nothing passes, and nobody is told."""
        batch("ip", f"{self._prefix}.switch", [f"link set port{self._checked(host)} down"])

    def plug(self, host: int) -> None:
        """Switch a host's link on again."""
        batch("ip", f"{self._prefix}.switch", [f"link set port{self._checked(host)} up"])

    def set_way(self, way: Way) -> None:
        """Change what frames meet between nodes, while connections go on. Those under way keep the time that they have.

        Raises:
            RuntimeError: the laboratory was made without `delay`, or its process has ended.
        """
        if self._core is None:
            raise RuntimeError("no frame waits between the nodes of this laboratory: make it with delay=")
        assert self._core.stdin is not None and self._core.stdout is not None
        in_frames(self._prefix, self.wires, way.loss > 0)
        try:
            self._core.stdin.write(distance.order(way))
            answer = self._core.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if answer != b"ready\n":
            raise RuntimeError("the process in which frames wait between nodes has ended")
        self.way = way

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Let all frames between nodes wait, those under way, too; nobody is told."""
        self.set_way(replace(self.way, halted=True))
        try:
            yield
        finally:
            self.set_way(replace(self.way, halted=False))

    def cut(self) -> None:
        """End the process in which frames wait: nothing passes between nodes any more, and nobody is told."""
        if self._core is not None:
            self._core.kill()

    def _middle(self) -> "subprocess.Popen[bytes]":
        words = ["ip", "netns", "exec", f"{self._prefix}.switch", sys.executable, distance.__file__, *self.wires.ends]
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)

    @contextmanager
    def stalled(self, host: int) -> Iterator[None]:
        """All processes of a host stand still, while its kernel goes on to answer for them."""
        inode = self.namespace(host).stat().st_ino
        self._signal(residents({inode}), signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(residents({inode}), signal.SIGCONT)

    @staticmethod
    def _signal(pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _name(self, host: int) -> str:
        if not self._prefix:
            raise RuntimeError("this laboratory has not been entered: use `with Lab(…) as lab:`")
        return host_name(self._prefix, host)

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise ValueError(f"there is no host {host!r}; they are 0 to {self.hosts - 1}")
        self._name(host)
        return host
