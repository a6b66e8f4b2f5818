"""The check of the extrapolation: links measured between 2 hosts, steps predicted for more, beside measured ones.

The steps and the networks are those that `python -m bench.network` has measured in the laboratory. All hosts share the
cores of one machine there, so their own work takes longer the more they are, which is not so on a cluster: the second
prediction takes the speeds of codecs, copies and threads that as many ranks found, and only the links of 2.
"""

import json
from dataclasses import dataclass, replace
from statistics import median

import baguakit as bk
from bench.network.contenders import ALONE, CONTENDERS
from bench.network.plan import compute_of
from bench.network.steps import SCALED_RATE
from bench.network.table import RESULTS, Table
from bench.network.tasks import task

MEASURED, PREDICTED = 2, (4, 8)  # hosts
TASK = "wide"


@dataclass(frozen=True)
class Checked:
    """A step that was measured, in seconds, and its predictions from measurements of two hosts.

    Attributes:
        from_two: from the links and the speeds of two hosts.
        links_of_two: from the links of two hosts, and the speeds of as many as trained.
    """

    algorithm: str
    hosts: int
    measured: float
    from_two: float
    links_of_two: float


def checked(trained: Table, probed: Table) -> list[Checked]:
    """Return every step without stragglers that more than two hosts made, beside its predictions."""
    networks = {
        cell["hosts"]: bk.tune.Network.from_json(json.dumps(result["network"]))
        for cell, result in probed
        if cell["rate"] == SCALED_RATE
    }
    model, found = task(TASK).model(), []
    for hosts in PREDICTED:
        there = {"rate": SCALED_RATE, "hosts": hosts, "straggler": False, "task": TASK}
        steps = {cell["algorithm"]: result for cell, result in trained if there.items() <= cell.items()}
        steps.pop(ALONE, None)
        compute, of_two = compute_of(steps), networks[MEASURED].of(hosts)
        links = replace(networks[hosts], links=of_two.links)
        for each in CONTENDERS:
            if each.algorithm is not None and each.name in steps:
                predicted = [bk.tune.predict(each.algorithm, model, net, compute).seconds for net in (of_two, links)]
                found.append(Checked(each.name, hosts, steps[each.name]["step"], *predicted))
    return found


def report() -> str:
    """Return the comparison as a table, and what it comes to."""
    rows = checked(Table(RESULTS / "network-steps.jsonl"), Table(RESULTS / "network-probes.jsonl"))
    lines = [f"{'':<30}{'hosts':>6}{'measured':>10}{'from 2 hosts':>20}{'links from 2':>20}"]
    for row in rows:
        shown = "".join(f"{p:>12.3f} s {p / row.measured - 1:>+6.0%}" for p in (row.from_two, row.links_of_two))
        lines.append(f"{row.algorithm:<30}{row.hosts:>6}{row.measured:>8.3f} s{shown}")
    for hosts in PREDICTED:
        both = [
            median(abs(getattr(row, way) / row.measured - 1) for row in rows if row.hosts == hosts)
            for way in ("from_two", "links_of_two")
        ]
        lines.append(f"{'median error':<30}{hosts:>6}{'':>10}{both[0]:>20.0%}{both[1]:>20.0%}")
    return "\n".join(lines)
