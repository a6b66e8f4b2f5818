"""The same ranks over the loopback device, for users who are not root; nothing limits its speed."""

import socket
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TextIO

from .counters import Counters, of_interface
from .ranks import Hosts, Ranks


class Loopback(Hosts):
    """As many ranks on this machine as it stands. Nothing can be shaped."""

    def __init__(self, hosts: int) -> None:
        if not isinstance(hosts, int) or hosts < 1:
            raise ValueError(f"there is 1 host or more, not {hosts!r}")
        self.hosts = hosts

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def start(
        self,
        command: Sequence[str] | Callable[[int], Sequence[str]],
        *,
        env: Mapping[str, str] | None = None,
        echo: TextIO | None = None,
    ) -> Ranks:
        """Start a command as every rank; see `Lab.start`."""
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
        sizes = {"WORLD_SIZE": str(self.hosts), "LOCAL_WORLD_SIZE": str(self.hosts)}
        ranks = range(self.hosts)
        environments = [{"RANK": str(r), "LOCAL_RANK": str(r), **sizes, **meeting, **(env or {})} for r in ranks]
        return Ranks([list(command(r) if callable(command) else command) for r in ranks], environments, echo)

    def bytes(self) -> list[Counters]:
        """Return the counters of the loopback device, which all ranks and other programs share."""
        return [of_interface("lo")]
