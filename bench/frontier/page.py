"""The page of seconds to a loss: bench/frontier/README.md."""

import json
import os
from pathlib import Path

from baguakit.compare.compose import SHARES, table_of
from bench.network.page import machine
from bench.network.table import RESULTS, Table

from . import compose, timing
from .picture import PICTURES
from .timing import HOSTS, NETWORKS
from .trajectories import MADE, MORE, PATH, TASK

PAGE = Path(__file__).parent / "README.md"
PLANNED = Path(__file__).parents[2] / "baguakit" / "tune" / "measured.json"
TIMINGS = RESULTS / "frontier-steps.jsonl"

HEAD = """# Seconds to the same loss

This page is written by `python -m bench.frontier page` from the lines of JSON in `bench/results/`; do not edit it.

A GPT over bytes ({layers} layers, {width} wide, 3.2 million values) learns the sources of Python's own library;
every rank has {batch} windows of {context} bytes in a step. The loss is that of the mean of the ranks' weights, in
bits per byte of text that no rank trains on. The learning rate rises for {warmup} steps and then stays. Each
contender has up to {trials} trials of it, of {tried} steps, each twice or half of the best one before; the
best is used. DDP trains for {steps} steps, the others for {longest}.

A synchronous training takes the same course on every network. So its losses by step are recorded once, on loopback,
and its seconds and bytes by step on each network; the tables are *composed* of both. Ranks that do not wait for each
other are trained on each network itself.

Targets are DDP's losses after {shares} steps. Losses are means over seeds; – is one that was never reached. After ±
stands half the range over seeds, – if one of them did not reach the loss. *r* is computation to DDP's communication in
a step; the *ceiling* is DDP's step to computation alone, which no exchange can surpass.
"""


def write(path: Path = PAGE) -> Path:
    """Write the page from what has been measured, and return its path."""
    losses, timings = Table(PATH), Table(TIMINGS)
    shares = ", ".join(str(round(share * MADE.steps)) for share in SHARES)
    facts = TASK.facts() | {"steps": MADE.steps, "longest": MADE.longest, "shares": shares}
    parts = [HEAD.format(**facts, tried=MADE.tried, trials=MADE.trials)]
    for name, picture in PICTURES.items():
        if (file := RESULTS / f"{name}.png").exists():
            parts.append(f"![{picture.about}]({os.path.relpath(file, path.parent)})\n")
    for network in NETWORKS:
        parts += section(losses, timings, network, HOSTS)
    for network in timing.MORE:
        parts += section(losses, timings, network, MORE)
    parts += checked(timings)
    if not len(timings):
        parts.append(f"Not timed yet; {len(losses)} trainings are in `bench/results/`.\n")
    parts += ["## Measured on\n", *(f"* {machine(on)}" for on in [*losses.machines, *timings.machines]), ""]
    path.write_text("\n".join(parts))
    return path


def write_for_plans(path: Path = PLANNED) -> Path:
    """Write what `bk.tune.plan` shows of these trainings, and return its path."""
    about = "steps to the loss that DDP ends with, as a multiple of DDP's, by algorithm; by python -m bench.frontier"
    found = {"about": about, "steps": compose.steps_beside_ddp(Table(PATH))}
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    return path


def section(losses: Table, timings: Table, network: str, hosts: int) -> list[str]:
    """Return the table of a network."""
    found, goals = compose.rows(losses, timings, network, hosts), compose.targets(losses, hosts)
    if not found or not goals:
        return []
    lines = [f"## {network}, {hosts} hosts\n"]
    if here := compose.place(timings, network, hosts):
        lines.append(f"r = {here.r:.2f}; ceiling {here.ceiling:.1f}.\n")
    return [*lines, *table_of(found, goals, MADE.steps), ""]


def checked(timings: Table) -> list[str]:
    """Return the table of trainings on a network itself, beside their composed times."""
    found = compose.checks(timings)
    if not found:
        return []
    lines = [
        "## Composed beside measured\n",
        "| | network | steps | seconds | composed | |",
        "|---|---|---|---|---|---|",
    ]
    for name, network, steps, measured, composed in found:
        lines.append(
            f"| {name} | {network} | {steps} | {measured:.1f} | {composed:.1f} | {composed / measured - 1:+.1%} |"
        )
    return [*lines, ""]
