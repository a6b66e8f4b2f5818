"""Which steps of training are measured: `python -m bench.network`."""

import itertools
from collections.abc import Sequence
from typing import Any

from .contenders import CONTENDERS

RATES = ("100mbit", "500mbit", "1gbit", "unshaped")
HOSTS, STEPS = 4, 40
SCALED = (2, 8)  # hosts of the scaling figure, beside HOSTS
SCALED_RATE = "500mbit"
QUICK_RATES = ("100mbit", "500mbit")
QUICK = (
    "no communication",
    "DDP",
    "DDP, bf16 hook",
    "DDP, PowerSGD hook",
    "bytegrad",
    "decentralized, AWC",
    "local_sgd",
)


def cells(quick: bool, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The cells to measure, those that answer most first.

    Args:
        quick: the wide task at two rates, seven contenders, without stragglers.
        only: names of contenders.
    """
    names = [each.name for each in CONTENDERS if not only or each.name in only]
    if quick:
        names = [name for name in names if only or name in QUICK]
        return [cell(name, rate=rate, steps=16) for rate, name in itertools.product(QUICK_RATES, names)]
    main = [
        cell(name, task=task, rate=rate, straggler=straggler)
        for straggler, task, rate, name in itertools.product((False, True), ("wide", "deep"), RATES, names)
    ]
    scaled = [cell(name, rate=SCALED_RATE, hosts=n) for n, name in itertools.product(SCALED, names)]
    return [*main[: len(main) // 2], *scaled, *main[len(main) // 2 :]]


def cell(
    algorithm: str,
    *,
    task: str = "wide",
    rate: str = "500mbit",
    hosts: int = HOSTS,
    straggler: bool = False,
    steps: int = STEPS,
) -> dict[str, Any]:
    """One measurement."""
    return {
        "algorithm": algorithm,
        "task": task,
        "rate": rate,
        "hosts": hosts,
        "straggler": straggler,
        "steps": steps,
    }
