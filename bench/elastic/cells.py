"""The measurements: algorithms, and what happens to their ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .torchft_peer import NAME as TORCHFT

HOSTS, RATE = 8, "100mbit"
SECONDS, SHORT = 300, 120  # of a training; the shorter one where ranks are killed more often, or one hangs
CALM, KILLS, HANG = "nothing", {"a kill every 60 s": 60, "a kill every 20 s": 20, "one kill": 25}, "a rank hangs"
ONCE, ONE_KILL, FEW = "one kill", 50, 4  # seconds, of which the kill comes in the middle; hosts
ONE_KILL_AT = ("100mbit", "500mbit", "1gbit")
TIMEOUT = 10.0  # of `bk.attach`, where a rank hangs; elsewhere its default


@dataclass(frozen=True)
class Trained:
    """An algorithm to train with.

    Attributes:
        algorithm: as an expression.
        equal: its ranks have the same weights, bit for bit, after each change of the group.
        once: it is also measured with one kill, at several rates.
    """

    algorithm: str
    equal: bool = False
    once: bool = False


ALGORITHMS = (
    Trained("gradient_allreduce()", equal=True, once=True),
    Trained("bytegrad(error_feedback=True)", equal=True, once=True),
    Trained("power_sgd(rank=4)", equal=True),
    Trained("decentralized(order='atc')"),
    Trained("decentralized(order='awc')"),
    Trained("choco(OnePeerExact(), gamma=1.0)"),
    Trained("local_sgd(every=8)", once=True),
    Trained("diloco(every=30)", once=True),
    Trained("async_model_average()"),
    Trained(TORCHFT, equal=True),
)


def cells() -> Iterator[dict[str, Any]]:
    """Return what is measured, by algorithm and event."""
    for event in (CALM, *(each for each in KILLS if each != ONCE), HANG):
        for each in ALGORITHMS:
            if event != HANG or each == ALGORITHMS[0]:
                seconds = SHORT if event == HANG or KILLS.get(event, 60) < 60 else SECONDS
                yield {"algorithm": each.algorithm, "event": event, "hosts": HOSTS, "rate": RATE, "seconds": seconds}
    for rate in ONE_KILL_AT:
        for each in ALGORITHMS:
            if each.once:
                yield {"algorithm": each.algorithm, "event": ONCE, "hosts": FEW, "rate": rate, "seconds": ONE_KILL}
