"""Accuracy of predicted steps: `python -m bench.network plan`.

Each network on which steps have been measured (`python -m bench.network`) is probed, by `bk.tune.probe` on as many
hosts; each step is predicted from that, and from what the same ranks computed alone, and set beside the measured one.
Compared is what the package trains, without stragglers: where one rank is slow, its computing is what all wait for.

    error       of a prediction: predicted / measured − 1
    pick        of the contenders of a network and task that which the predictions take for the fastest; its regret is
                its measured step to that of the fastest, − 1

Picks are made twice: among the contenders that average gradients and keep the loss, which is what `bk.tune.plan`
chooses from unless it is told more, and among all.
"""

import itertools
import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import baguakit as bk
from baguakit.tune.planning import compressors_in

from .contenders import ALONE, CONTENDERS
from .reports import aligned
from .steps import HOSTS, QUICK_RATES, RATES, SCALED, SCALED_RATE
from .table import Table
from .tasks import TASKS, task
from .train import on_every_host

SECONDS = 12.0  # for the messages of a probe
KEEPS_LOSS = ("gradient_allreduce", "bytegrad", "bytegrad, BFloat16")
Place = tuple[str, str, int, bool]  # task, rate, hosts, over loopback


def cells(quick: bool) -> list[dict[str, Any]]:
    """The networks to probe: those on which steps are measured."""
    places = [(rate, HOSTS) for rate in (QUICK_RATES if quick else RATES)]
    places += [] if quick else [(SCALED_RATE, hosts) for hosts in SCALED]
    return [{"hosts": hosts, "rate": rate, "seconds": SECONDS} for rate, hosts in places]


def measure(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Probe the network; every rank returns the same. Collective."""
    kinds = list(compressors_in([each.algorithm for each in CONTENDERS if each.algorithm is not None]))
    network = bk.tune.probe(bk.Comm(), flows=(1,), compressors=kinds, seconds=cell["seconds"])
    return {"network": json.loads(network.to_json())}


@dataclass(frozen=True)
class Compared:
    """A measured step and its prediction, in seconds."""

    place: Place
    algorithm: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted to measured, − 1."""
        return self.predicted / self.measured - 1


def compared(trained: Table, probed: Table) -> list[Compared]:
    """Every measured step of a network that has been probed, beside its prediction."""
    networks = {
        (cell["rate"], cell["hosts"], cell.get("loopback", False)): result["network"] for cell, result in probed
    }
    found: dict[Place, dict[str, Mapping[str, Any]]] = {}
    for cell, result in trained:
        where = cell["rate"], cell["hosts"], cell.get("loopback", False)
        if where in networks and not cell["straggler"] and cell["algorithm"] != ALONE:
            found.setdefault((cell["task"], *where), {})[cell["algorithm"]] = result
    algorithms = {each.name: each.algorithm for each in CONTENDERS}  # of those that are installed here
    rows = []
    for place, results in found.items():
        network, compute = bk.tune.Network.from_json(json.dumps(networks[place[1:]])), compute_of(results)
        for name, result in results.items():
            if (algorithm := algorithms.get(name)) is not None:
                row = bk.tune.predict(algorithm, task(place[0]).model(), network, compute)
                rows.append(Compared(place, name, result["step"], row.seconds))
    return rows


def compute_of(results: Mapping[str, Mapping[str, Any]]) -> bk.tune.Compute:
    """Return the computation of ranks without exchanges: the median of the runs of a place, a third before backward."""
    both = statistics.median(result["forward_backward"] for result in results.values())
    whole = statistics.median(result["compute"] for result in results.values())
    return bk.tune.Compute(both / 3, 2 * both / 3, max(0.0, whole - both))


@dataclass(frozen=True)
class Pick:
    """The algorithm that is predicted to be the fastest at a place, and the one that was."""

    place: Place
    among: str
    picked: str
    fastest: str
    regret: float


def picks(rows: list[Compared]) -> list[Pick]:
    """The picks at every place, among those that keep the loss and among all."""
    found = []
    for place, there in itertools.groupby(sorted(rows, key=lambda row: row.place), key=lambda row: row.place):
        every = list(there)
        for among, chosen in (("keep the loss", [r for r in every if r.algorithm in KEEPS_LOSS]), ("all", every)):
            if len(chosen) > 1:
                picked, fastest = min(chosen, key=lambda r: r.predicted), min(chosen, key=lambda r: r.measured)
                regret = picked.measured / fastest.measured - 1
                found.append(Pick(place, among, picked.algorithm, fastest.algorithm, regret))
    return found


def report(rows: list[Compared]) -> str:
    """Predictions and picks as tables, and what they come to."""
    if not rows:
        return "No step has been measured on a probed network: run `python -m bench.network` first."
    order = {each.name: i for i, each in enumerate(CONTENDERS)}
    tasks = [each.name for each in TASKS]
    ordered = sorted(
        rows, key=lambda r: (tasks.index(r.place[0]), RATES.index(r.place[1]), r.place[2], order[r.algorithm])
    )
    table = [("task", "rate", "hosts", "algorithm", "measured ms", "predicted ms", "error")]
    for r in ordered:
        times = (f"{r.measured * 1e3:.1f}", f"{r.predicted * 1e3:.1f}", f"{r.error:+.1%}")
        table.append((r.place[0], r.place[1], str(r.place[2]), r.algorithm, *times))
    choices = [("task", "rate", "hosts", "among", "picked", "algorithm", "regret")]
    for p in picks(rows):
        choices.append((p.place[0], p.place[1], str(p.place[2]), p.among, p.picked, p.fastest, f"{p.regret:.1%}"))
    return "\n\n".join([aligned(table), aligned(choices), summary(rows)])


def summary(rows: list[Compared]) -> str:
    """Return a sentence about the errors and one about the picks."""
    errors, chosen = [abs(row.error) for row in rows], picks(rows)
    good = sum(pick.regret <= 0.05 for pick in chosen)
    return (
        f"{len(rows)} steps: the median error is {statistics.median(errors):.1%}, the largest {max(errors):.0%}.\n"
        f"{good} of {len(chosen)} picks are within 5 % of the fastest."
    )


def save(rows: list[Compared], path: Path) -> None:
    """Keep the comparison as JSON."""
    found = {"steps": [asdict(row) | {"error": row.error} for row in rows], "picks": [asdict(p) for p in picks(rows)]}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    on_every_host(measure)
