"""The measurements: algorithms, and what happens to their ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .torchft_peer import NAME as TORCHFT

HOSTS, RATE = 8, "100mbit"
SECONDS, SHORT = 300, 120  # of a training; the shorter one where ranks are killed more often, or one hangs
CALM, KILLS, HANG = "nothing", {"a kill every 60 s": 60, "a kill every 20 s": 20}, "a rank hangs"
TIMEOUT = 10.0  # of `bk.attach`, where a rank hangs; elsewhere its default


@dataclass(frozen=True)
class Trained:
    """An algorithm to train with.

    Attributes:
        algorithm: as an expression.
        equal: its ranks have the same weights, bit for bit, after each change of the group.
    """

    algorithm: str
    equal: bool = False


ALGORITHMS = (
    Trained("gradient_allreduce()", equal=True),
    Trained("bytegrad(error_feedback=True)", equal=True),
    Trained("power_sgd(rank=4)", equal=True),
    Trained("decentralized(order='atc')"),
    Trained("decentralized(order='awc')"),
    Trained("choco(OnePeerExact(), gamma=1.0)"),
    Trained("local_sgd(every=8)"),
    Trained("diloco(every=30)"),
    Trained("async_model_average()"),
    Trained(TORCHFT, equal=True),
)


def cells() -> Iterator[dict[str, Any]]:
    """Return what is measured, by algorithm and event."""
    for event in (CALM, *KILLS, HANG):
        for each in ALGORITHMS:
            if event != HANG or each == ALGORITHMS[0]:
                seconds = SHORT if event == HANG or KILLS.get(event, 60) < 60 else SECONDS
                yield {"algorithm": each.algorithm, "event": event, "hosts": HOSTS, "rate": RATE, "seconds": seconds}
