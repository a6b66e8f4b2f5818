"""The page of measurements on networks: bench/network/README.md."""

import os
from collections.abc import Callable
from pathlib import Path

from baguakit.compare.table import in_words as machine

from . import plan, reports
from .table import RESULTS, Table
from .tasks import TASKS

PAGE = Path(__file__).parent / "README.md"

HEAD = """# Slow networks

This page is written by `python -m bench.network figures` from the lines of JSON in `bench/results/`; do not edit it.
What the words of its tables mean, and how to measure again, is said in `bench/network/__init__.py`.

Hosts are network namespaces of one machine, joined by links that token buckets slow down. All share its cores: a
step that computes or compresses while others do takes longer than it would on a machine of its own. A ratio to the
line (bytes / rate, headers not counted) reflects, on fast links, contention for these cores as much as bandwidth.
For the same reason the throughput beside that without exchange rises with hosts: they compute slower, and exchanges
do not. Steps here are few; losses against time are those of [the frontier](../frontier/README.md).

What is trained:

"""

PICTURES = {
    "network-throughput": "Throughput by bandwidth",
    "network-scaling": "Scaling by hosts that share two cores",
    "network-straggler": "Speed kept beside a straggler",
    "network-exchanges": "Exchanges beside their ideal lines",
    "network-collectives": "Compressed collectives beside their ideal lines",
}


def write(results: Path = RESULTS, page: Path = PAGE) -> Path:
    """Write the page from what is in the folder of results, pictures and tables, and return its path."""
    steps, exchanges, collectives, few, flows, programs, staged, versions, probes = (
        Table(results / f"network-{name}.jsonl")
        for name in ("steps", "exchanges", "collectives", "few", "flows", "backend", "staged", "versions", "probes")
    )
    sections: list[tuple[str, Table, Callable[[], str]]] = [
        ("Steps of training", steps, lambda: reports.of_steps(steps)),
        ("Exchanges alone", exchanges, lambda: reports.of_exchanges(exchanges)),
        ("Compressed collectives alone", collectives, lambda: reports.of_exchanges(collectives)),
        ("Few values", few, lambda: reports.of_few(few)),
        ("Several connections", flows, lambda: reports.of_flows(flows)),
        ("Programs over the backend", programs, lambda: reports.of_backend(programs)),
        ("Through the memory of the host", staged, lambda: reports.of_staged(staged)),
        ("Weights that changed", versions, lambda: reports.of_versions(versions)),
        ("Predictions", probes, lambda: plan.report(plan.compared(steps, probes))),
    ]
    parts = [HEAD + "".join(f"* `{task.name}`: {task.about}\n" for task in TASKS)]
    for name, words in PICTURES.items():
        if (path := results / f"{name}.png").exists():
            parts.append(f"![{words}]({os.path.relpath(path, page.parent)})\n")
    for title, table, report in sections:
        if len(table):
            on = "; ".join(map(machine, table.machines))
            parts.append(f"## {title}\n\nOn {on}.\n\n```\n{report()}\n```\n")
    page.write_text("\n".join(parts))
    return page
