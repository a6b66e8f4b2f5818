"""What has been measured on networks, as a page to read: bench/network/README.md."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import plan, reports
from .table import RESULTS, Table

PAGE = Path(__file__).parent / "README.md"

HEAD = """# Slow networks

This page is written by `python -m bench.network figures` from the lines of JSON in `bench/results/`; do not edit it.
What the words of its tables mean, and how to measure again, is said in `bench/network/__init__.py`.

Hosts are network namespaces of one machine, joined by links that token buckets slow down. All share its cores: a
step that computes or compresses while others do takes longer than it would on a machine of its own, and a ratio to the
line (bytes / rate, headers not counted) says at fast links as much of the cores as of the network.
"""

PICTURES = {
    "network-throughput": "Throughput by bandwidth",
    "network-scaling": "Scaling by hosts",
    "network-loss": "Training loss against time",
    "network-straggler": "Speed kept beside a straggler",
    "network-exchanges": "Exchanges beside their ideal lines",
}
Tables = Mapping[str, Table]


def write(tables: Tables, page: Path = PAGE, results: Path = RESULTS) -> Path:
    """Write the page and return its path.

    Args:
        tables: "steps", "exchanges", "flows" and "probes"; one without cells has no section.
        page: where to.
        results: the folder of the pictures, of which those that are there are shown.
    """
    sections: dict[str, tuple[str, Callable[[Table], str]]] = {
        "Steps of training": ("steps", reports.of_steps),
        "Exchanges alone": ("exchanges", reports.of_exchanges),
        "Several connections": ("flows", reports.of_flows),
        "Predictions": ("probes", lambda probes: plan.report(plan.compared(tables["steps"], probes))),
    }
    parts = [HEAD]
    for name, words in PICTURES.items():
        path = results / f"{name}.png"
        if path.exists():
            parts.append(f"![{words}]({os.path.relpath(path, page.parent)})\n")
    for title, (key, report) in sections.items():
        if len(tables[key]):
            on = "; ".join(machine(each) for each in tables[key].machines)
            parts.append(f"## {title}\n\nOn {on}.\n\n```\n{report(tables[key])}\n```\n")
    page.write_text("\n".join(parts))
    return page


def machine(on: Mapping[str, Any]) -> str:
    """A machine in a line."""
    return f"{on['cpu']}, {on['cores']} cores, Linux {on['kernel']}, torch {on['torch']}, {on['date']}"
