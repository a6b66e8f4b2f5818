"""Counters of an interface: the kernel's numbers, from /sys/class/net/*/statistics."""

import json
from dataclasses import dataclass
from pathlib import Path

from .commands import run

HEADERS = 14 + 20 + 32  # of Ethernet, IPv4 and TCP with its timestamps: what a packet has beside its payload


@dataclass(frozen=True)
class Counters:
    """Bytes and packets that have left and entered a host. Differences of two tell what passed in between."""

    sent: int
    received: int
    packets_sent: int
    packets_received: int

    @property
    def payload(self) -> int:
        """Bytes sent without headers; an acknowledgement is nothing but headers."""
        return self.sent - HEADERS * self.packets_sent

    def __sub__(self, other: "Counters") -> "Counters":
        return Counters(*(mine - theirs for mine, theirs in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, int, int, int]:
        """The four numbers."""
        return self.sent, self.received, self.packets_sent, self.packets_received


def of_namespace(namespace: str, interface: str) -> Counters:
    """The counters of an interface in a namespace, read from outside."""
    (link,) = json.loads(run("ip", "-n", namespace, "-json", "-statistics", "link", "show", interface))
    tx, rx = link["stats64"]["tx"], link["stats64"]["rx"]
    return Counters(tx["bytes"], rx["bytes"], tx["packets"], rx["packets"])


def of_interface(interface: str) -> Counters:
    """The counters of an interface where this process lives; /sys must be that of its own namespace."""
    folder = Path("/sys/class/net") / interface / "statistics"
    names = ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")
    return Counters(*(int((folder / name).read_text()) for name in names))
