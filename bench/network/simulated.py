"""Simulated steps beside measured ones: `python -m bench.network.simulated` prints a table of docs/situations.

Four hosts on a shaped network are all alike, or one of them is a straggler, which sleeps. `bk.tune.simulate` is given
the probe of the network (`bench/results/network-probes.jsonl`) and the step of four hosts that exchange nothing.
Compared are the steps that all ranks make in a second (`bench/results/network-steps.jsonl`). The hosts share two cores.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from baguakit.tune import Compute, Machine, Network, simulate

from .contenders import ALONE, CONTENDERS
from .plan import compute_of
from .steps import HOSTS, SLOWNESS
from .table import RESULTS, Table
from .tasks import task

TASK, SECONDS, NEAR = "wide", 1000.0, 0.15
NAMES = ("gradient_allreduce", "bytegrad", "local_sgd", "diloco")
RATES = {"100mbit": "100 Mb/s", "500mbit": "500 Mb/s", "1gbit": "1 Gb/s"}


@dataclass(frozen=True)
class Cell:
    """Steps a second of all ranks, with an algorithm on a network."""

    name: str
    rate: str
    straggler: bool
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Return simulated to measured, − 1."""
        return self.simulated / self.measured - 1


def cells() -> Iterator[Cell]:
    """Yield the cells that are compared, simulated now."""
    found: dict[tuple[str, bool], dict[str, Any]] = {}
    for cell, result in Table(RESULTS / "network-steps.jsonl"):
        if (cell["task"], cell["hosts"]) == (TASK, HOSTS) and not cell.get("loopback"):
            found.setdefault((cell["rate"], cell["straggler"]), {})[cell["algorithm"]] = result
    probed = Table(RESULTS / "network-probes.jsonl")
    probes = {cell["rate"]: result["network"] for cell, result in probed if cell["hosts"] == HOSTS}
    algorithms = {each.name: each.algorithm for each in CONTENDERS if each.algorithm is not None}
    for straggler in (False, True):
        for rate in RATES:
            compute = computing(found[rate, False])
            nap = (SLOWNESS - 1) * (compute.forward + compute.backward)
            slow = Machine("slow", Compute(compute.forward + nap, compute.backward, compute.optimizer))
            machines = [Machine("host", compute, count=HOSTS - straggler), *[slow] * straggler]
            network = Network.from_json(json.dumps(probes[rate]))
            for name in NAMES:
                made = simulate(task(TASK).model(), algorithms[name], machines, network, seconds=SECONDS)
                measured = sum(1 / step for step in found[rate, straggler][name]["step_by_rank"])
                yield Cell(name, rate, straggler, measured, made.tokens / SECONDS)


def computing(results: Mapping[str, Any]) -> Compute:
    """Return the computation of the step of hosts that exchange nothing, whose parts are as other runs timed them."""
    parts = compute_of(results)
    share = median(results[ALONE]["step_by_rank"]) / parts.seconds
    return Compute(parts.forward * share, parts.backward * share, parts.optimizer * share)


def table(every: Sequence[Cell]) -> str:
    """Return the table in Markdown."""
    lines = ["| | " + " | ".join(f"`{name}`" for name in NAMES) + " |", "|---" * (1 + len(NAMES)) + "|"]
    for straggler in (False, True):
        for rate, shown in RATES.items():
            row = [each for each in every if (each.rate, each.straggler) == (rate, straggler)]
            values = [f"{each.simulated:.1f} / {each.measured:.1f} ({each.error:+.0%})" for each in row]
            lines.append(f"| {shown}{', one straggler' * straggler} | " + " | ".join(values) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table([*cells()]))
