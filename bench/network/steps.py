"""Which steps of training are measured: `python -m bench.network`."""

import itertools
from collections.abc import Sequence
from typing import Any

from .contenders import CONTENDERS, FOUR_BITS

RATES = ("100mbit", "500mbit", "1gbit", "unshaped")
HOSTS, STEPS = 4, 24
SCALED = (2, 8)  # hosts of the scaling figure, beside HOSTS
SCALED_RATE = "500mbit"
STRAGGLED = (SCALED_RATE, "1gbit", "unshaped", "100mbit")  # where one of the hosts is a straggler as well
SLOWNESS = 4  # how many times slower a straggler is
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


# Where next to nothing is computed, a step shows what an algorithm costs: those that average gradients are compared.
AVERAGING = (
    "no communication",
    "DDP",
    "DDP, bf16 hook",
    "DDP, PowerSGD hook",
    "gradient_allreduce",
    "bytegrad",
    "bytegrad, BFloat16",
    "power_sgd",
    "top_k",
)


def cells(quick: bool, only: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """The cells to measure, those that answer most first.

    Args:
        quick: the wide task at two rates, seven contenders, without stragglers.
        only: names of contenders.
    """
    names, few = ([e.name for e in each if not only or e.name in only] for each in (CONTENDERS, FOUR_BITS))
    if quick:
        names = [name for name in names if only or name in QUICK]
        return [cell(name, rate=rate, steps=16) for rate, name in itertools.product(QUICK_RATES, names)]
    everywhere = itertools.product(("wide", "deep"), RATES, names)
    return [
        *(cell(name, task=task, rate=rate) for task, rate, name in everywhere),
        *(cell(name, task="embedding", rate=rate) for rate in RATES for name in names if name in AVERAGING),
        *(cell(name, rate=SCALED_RATE, hosts=n) for n, name in itertools.product(SCALED, names)),
        *(
            cell(name, task=t, rate=rate, straggler=True)
            for rate, t, name in itertools.product(STRAGGLED, ("deep", "wide"), names)
        ),
        *(cell(name, rate=rate) for rate, name in itertools.product(QUICK_RATES, few)),
    ]


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
