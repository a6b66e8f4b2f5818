"""The page of many ranks: bench/scaling/many/README.md."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.network.table import RESULTS

from . import __doc__ as about

PAGE = Path(__file__).parent / "README.md"
__all__ = ["PAGE", "RESULTS", "write"]
HEAD = """# Many ranks

This page is written by `python -m bench.scaling.many page` from the JSON in `bench/results/`; do not edit it.

"""
ONE = """## One rank of many

The real `attach`, engine and stages of rank 0 among n, against a group and a store that send nothing, answer at once
for the other ranks, and count. The model is one bucket of 1,048,576 values (4 MiB). A step is the mean over a period of
the graph, after one period; calls are Python's, without those of the model and the optimizer alone. An all-reduce
counts as one collective. At `attach` rank 0, and
no other, reads the digests of all ranks in one request: its calls grow by two for each.
"""
ALL = """## Many ranks on one machine

Real processes over gloo, forked from one that has imported torch, one thread each, on {cores} cores. Seconds of
`attach` are those of the slowest rank, the median of {repeats} runs; memory and descriptors are the largest of a rank
that does not hold the store, after two steps.
"""


def write(results: Path, page: Path = PAGE) -> Path:
    """Write the page from what has been measured, and return its path."""
    parts = [HEAD + (about or "")]
    one, machine = results / "many-one.json", results / "many-all.json"
    if one.exists():
        rows = json.loads(one.read_text())
        parts += [ONE, *(f"### {name}\n\n{of_one(found)}\n" for name, found in grouped(rows).items())]
    if machine.exists():
        found = json.loads(machine.read_text())
        parts.append(ALL.format(cores=found["cores"], repeats=found["repeats"]))
        parts += [f"### {name}\n\n{of_machine(rows)}\n" for name, rows in grouped(found["rows"]).items()]
    page.write_text("\n".join(parts))
    return page


def grouped(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Return the rows of each algorithm, by rising n."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["ranks"]):
        found.setdefault(f"`{row['algorithm']}`", []).append(row)
    order = list(dict.fromkeys(f"`{row['algorithm']}`" for row in rows))
    return {name: found[name] for name in order}


def of_one(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of one rank of many."""
    head = "n", "calls a step", "messages", "collectives", "MB sent", "peers", "requests", "tensors, MiB", "threads"
    lines = [
        (
            f"{row['ranks']:,}",
            f"{row['step']['calls']:,.0f}",
            f"{row['step']['messages']:,.3g}" if row["step"]["messages"] < 1000 else f"{row['step']['messages']:,.0f}",
            f"{row['step']['collectives']:,.3g}",
            f"{row['step']['bytes'] / 1e6:.2f}",
            f"{row['peers']:,}",
            f"{row['step']['requests']:,.3g}",
            f"{row['tensors'] / 2**20:.1f}",
            f"+{row['added']['threads']:.0f}",
        )
        for row in rows
    ]
    if not all("attach" in row for row in rows):  # it was not measured with these
        return table(head, lines)
    at_start = "attach: calls", "requests", "messages", "MB sent"
    starts = [
        (
            f"{row['attach']['calls']:,}",
            f"{row['attach']['requests']:,}",
            f"{row['attach']['messages'] + row['attach']['collectives']:,}",
            f"{row['attach']['bytes'] / 1e6:.2f}",
        )
        for row in rows
    ]
    return table([*head, *at_start], [(*line, *start) for line, start in zip(lines, starts, strict=True)])


def of_machine(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of many ranks on one machine."""
    head = "n", "seconds to start all", "of attach", "a rank", "MiB of attach", "MiB of a rank"
    lines = [
        (
            f"{row['ranks']}",
            f"{row['started']:.1f}",
            f"{row['seconds']:.2f}",
            f"{row['seconds'] / row['ranks']:.3f}",
            f"{row['MiB']:.0f}",
            f"{row['of process']:.0f}",
            f"{row['descriptors at attach']:.0f}",
            f"{row['descriptors']:.0f}",
        )
        for row in rows
    ]
    return table([*head, "descriptors of attach", "after 2 steps"], lines)


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown, of numbers."""
    return "\n".join(
        ["| " + " | ".join(head) + " |", "|--:" * len(head) + "|", *("| " + " | ".join(x) + " |" for x in lines)]
    )
