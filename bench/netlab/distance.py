"""The way between nodes, as long as one likes: a process that holds each frame until its time has come.

A laboratory starts it in the namespace of its switch, with the names of the interfaces that meet there. Packet sockets
take the frames from the end of each node's cable, and put them on the others. Nobody answers on the way, so TCP itself
meets the delay, from one host to the other: its windows, its slow start, its time-outs. That needs neither netem nor a
TUN device. A packet of up to 64 KiB passes whole, with the header that says into which frames it is to be cut
(PACKET_VNET_HDR), as it does on the cables; where frames are to be lost, they come one by one. The process takes a
fifth of a core at 1 Gb/s.

Orders are lines of JSON on stdin, each with all of what `Way` has; "ready" on stdout answers each. The process ends
with its stdin.
"""

import contextlib
import heapq
import json
import os
import random
import re
import select
import socket
import sys
import time
from dataclasses import asdict, dataclass

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE, ETH_P_ALL = 32, 33, 3
HEADER = 10  # bytes of the virtio header before each frame
LARGEST = 1 << 17  # bytes of a packet, headers and all
BUFFER = 64 << 20  # bytes: of a socket, and the most that waits on the way; what comes then is dropped
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Way:
    """The delay of frames between two nodes, and their loss.

    Attributes:
        there, back: seconds from a node to a later one, and to an earlier one.
        jitter: seconds; each frame is later by up to so many, yet none passes the one before it.
        loss: the share of frames that are lost.
        halted: whether all frames wait.
    """

    there: float = 0.0
    back: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    halted: bool = False

    def __post_init__(self) -> None:
        if min(self.there, self.back, self.jitter) < 0 or not 0 <= self.loss <= 1:
            raise ValueError(f"times are not negative, and a loss is from 0 to 1: {self}")


def way(delay: "str | tuple[str, str]", jitter: str = "0ms", loss: float = 0.0) -> Way:
    """Return the way of a delay such as "25ms", or ("10ms", "40ms"): to later nodes, and to earlier ones."""
    there, back = (delay, delay) if isinstance(delay, str) else delay
    return Way(seconds(there), seconds(back), seconds(jitter), loss)


def seconds(time: str) -> float:
    """Return the seconds of a time such as "25ms".

    Raises:
        ValueError: it is no number with a unit.
    """
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", time)):
        raise ValueError(f'a time is a number and a unit, such as "25ms" (us, ms, s), not {time!r}')
    return float(found[1]) * UNITS[found[2]]


def order(way: Way) -> bytes:
    """Return the line that gives this order."""
    return json.dumps(asdict(way)).encode() + b"\n"


class Core:
    """The middle, where the nodes' cables meet: it learns behind which an address is, and lets frames wait."""

    def __init__(self, interfaces: list[str]) -> None:
        self.sockets = [_opened(interface) for interface in interfaces]
        self.way = Way()
        self._random = random.Random(0)
        self._port: dict[bytes, int] = {}  # of each hardware address
        self._waiting: list[tuple[float, int, int, bytes]] = []  # a heap: when due, number, where to, frame
        self._held = self._number = 0
        self._latest: dict[tuple[int, int], float] = {}  # when the last frame of each way is due

    def take(self, port: int) -> None:
        """Take all frames that a node has sent."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._hold(port, self.sockets[port].recv(LARGEST))

    def _hold(self, source: int, frame: bytes) -> None:
        now = time.monotonic()
        to, by = frame[HEADER : HEADER + 6], frame[HEADER + 6 : HEADER + 12]
        self._port[by] = source
        known = self._port.get(to)
        for target in range(len(self.sockets)) if known is None else (known,):
            if target == source or self._held > BUFFER or self._random.random() < self.way.loss:
                continue
            due = now + (self.way.there if source < target else self.way.back)
            if self.way.jitter:
                due = max(due + self._random.uniform(0, self.way.jitter), self._latest.get((source, target), 0.0))
                self._latest[source, target] = due
            heapq.heappush(self._waiting, (due, self._number, target, frame))
            self._number += 1
            self._held += len(frame)

    def give(self) -> float | None:
        """Send the frames that are due; return the seconds until the next one is, None if nothing is to come."""
        while self._waiting and not self.way.halted:
            if (rest := self._waiting[0][0] - time.monotonic()) > 0:
                return rest
            *_, target, frame = heapq.heappop(self._waiting)
            self._held -= len(frame)
            with contextlib.suppress(OSError):  # the queue before the link is full, or the link is off
                self.sockets[target].send(frame)
        return None


def _opened(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        opened.setsockopt(socket.SOL_SOCKET, option, BUFFER)
    opened.bind((interface, ETH_P_ALL))
    return opened


def main(interfaces: list[str]) -> None:
    """Let frames wait until stdin ends."""
    _hurry()
    core = Core(interfaces)
    port_of = {each.fileno(): port for port, each in enumerate(core.sockets)}
    orders = sys.stdin.fileno()
    while True:
        ready, _, _ = select.select([orders, *port_of], [], [], core.give())
        for each in ready:
            if each != orders:
                core.take(port_of[each])
            elif line := sys.stdin.buffer.readline():
                core.way = Way(**json.loads(line))
                print("ready", flush=True)
            else:
                return


def _hurry() -> None:
    """Come before the processes of the hosts, with which this one shares the cores: a late frame is a longer way."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)


if __name__ == "__main__":
    main(sys.argv[1:])
