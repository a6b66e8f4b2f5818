"""A limit on the rate at which this process sends over TCP, without root: SO_MAX_PACING_RATE on each of its sockets.

The kernel keeps each socket below its own rate. To keep the process below one, as the network card of a machine would,
a thread divides the rate among the connections that have bytes to send, every two milliseconds. Connections that open
later are found within twenty; until then they have no limit.

Two things are coarser than on a real link. Over the loopback device a packet has up to 64 KiB, and leaves at once if
the connection was idle: smaller messages are too fast. And a connection may get its share one packet late.
"""

import sys
import threading
import time
from contextlib import suppress

import torch

from ...comm import Comm
from ..refusal import Refusal
from .connections import at, cap, connections, is_tcp, listens, unsent
from .rates import bytes_per_second, written

TICK, LOOK = 0.002, 0.02  # seconds between two divisions of the rate, and between two searches for new sockets
SECONDS = 0.25  # that a measured message takes at the rate
LEAST, MOST = 1 << 18, 1 << 26  # bytes of a measured message
UNLIMITED = -1
TOO_FAST, TOO_SLOW = 1.25, 0.8  # of the rate asked for


class Pacer:
    """Keeps all that this process sends over TCP below a rate, in a thread of its own. A context manager.

    Raises:
        OSError: this system is not Linux.
    """

    def __init__(self, bytes_per_second: float) -> None:
        if sys.platform != "linux":
            raise OSError("--rate needs Linux, whose sockets can be slowed down; leave it out")
        self._rate = bytes_per_second
        self._seen: set[str] = set()
        self._paced: dict[str, Paced] = {}
        self._over = threading.Event()
        self.look()
        self._thread = threading.Thread(target=self._watch, name="baguakit pacer", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        next_look = 0.0
        while not self._over.wait(TICK):
            if time.monotonic() >= next_look:
                self.look()
                next_look = time.monotonic() + LOOK
            self.share()

    def look(self) -> None:
        """Find connections that are new, and forget those that have been closed."""
        open_now = connections()
        for name in open_now.keys() - self._seen:
            with suppress(OSError), at(open_now[name]) as one:  # else it has been closed since
                if is_tcp(one) and not listens(one):
                    self._paced[name] = Paced(open_now[name], self._rate)
                self._seen.add(name)
        self._seen &= open_now.keys()
        self._paced = {name: each for name, each in self._paced.items() if name in open_now}

    def share(self) -> None:
        """Divide the rate among the connections that have bytes to send; an idle one may begin with all of it."""
        busy = [each for each in self._paced.values() if each.busy()]
        for each in self._paced.values():
            each.limit(self._rate / len(busy) if each in busy else self._rate)

    def close(self) -> None:
        """End the thread, and remove the limits."""
        self._over.set()
        self._thread.join()
        self.look()
        for each in self._paced.values():
            each.limit(UNLIMITED)

    def __enter__(self) -> "Pacer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Paced:
    """A connection with a limit, by its descriptor: a duplicate would keep it open after its owner has closed it.

    Should the descriptor be closed and used again before the next look, the worst is a limit for its new user.
    """

    def __init__(self, fd: int, rate: float) -> None:
        self.fd, self.rate = fd, 0.0
        self.limit(rate)

    def busy(self) -> bool:
        """Return whether bytes wait to be sent."""
        try:
            return unsent(self.fd) > 0
        except OSError:  # it is closed, and the next look forgets it
            return False

    def limit(self, rate: float) -> None:
        """Change the limit."""
        if rate != self.rate:
            self.rate = rate
            with suppress(OSError), at(self.fd) as one:
                cap(one, rate)


def measured(comm: Comm, bytes_per_second: float) -> tuple[float, float]:
    """Return the bytes per second that a rank sends to one other, and to all others at once. Collective."""
    others = [peer for peer in range(comm.size) if peer != comm.rank]
    message = torch.zeros(int(min(max(SECONDS * bytes_per_second, LEAST), MOST)), dtype=torch.uint8)
    to_one = seconds(comm, message, [(comm.rank - 1) % comm.size], [(comm.rank + 1) % comm.size])
    part = message[: len(message) // len(others)]
    to_all = seconds(comm, part, others, others)
    return len(message) / to_one, len(others) * len(part) / to_all


def seconds(comm: Comm, message: torch.Tensor, sources: list[int], targets: list[int]) -> float:
    """Return the seconds of an exchange, those of the slowest rank; a first one fills buffers and is not counted."""
    comm.exchange(message[:1], sources, targets)
    comm.gather_objects(None)
    began = time.perf_counter()
    comm.exchange(message, sources, targets)
    return float(max(comm.gather_objects(time.perf_counter() - began)))


def check_rates(asked: str, to_one: float, to_all: float) -> str:
    """Return the measured rates beside the one asked for, in words; raise a Refusal if sockets ignore the limit."""
    rate = bytes_per_second(asked)
    shown = f"{written(8 * to_one)} from a rank to one other, {written(8 * to_all)} to all others at once"
    if max(to_one, to_all) > TOO_FAST * rate:
        raise Refusal(
            f"the sockets of this system do not keep to a rate: asked for {written(8 * rate)}, got {shown}", 1
        )
    slow = min(to_one, to_all) < TOO_SLOW * rate
    busy = "\nThis machine moves less than that, or is busy: the times below are longer than they would be." * slow
    return f"asked for {written(8 * rate)}; measured {shown}{busy}"
