"""The page of seconds to a loss: bench/frontier/README.md."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from bench.network.page import machine
from bench.network.table import RESULTS, Table

from . import compose, timing, trajectories
from .compose import SHARES, Row
from .contenders import DDP
from .picture import PICTURES
from .task import TASK
from .timing import HOSTS, NETWORKS
from .trajectories import MORE, PATH, STEPS

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

HEADER = (
    "| | lr | ms a step | MB a step | s to {0:.3f} | to {1:.3f} | to {2:.3f} "
    "| times as fast as DDP | MB to it | loss at {3} |"
)


def write(path: Path = PAGE) -> Path:
    """Write the page from what has been measured, and return its path."""
    losses, timings = Table(PATH), Table(TIMINGS)
    shares = ", ".join(str(round(share * STEPS)) for share in SHARES)
    facts = TASK.described() | {"steps": STEPS, "longest": trajectories.LONGEST, "shares": shares}
    parts = [HEAD.format(**facts, tried=trajectories.TRIED, trials=trajectories.TRIALS)]
    for name, words in PICTURES.items():
        if (picture := RESULTS / f"{name}.png").exists():
            parts.append(f"![{words}]({os.path.relpath(picture, path.parent)})\n")
    for network in NETWORKS:
        parts += section(losses, timings, network, HOSTS)
    for network in timing.MORE:
        parts += section(losses, timings, network, MORE)
    parts += checked(losses, timings)
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
    lines += [HEADER.format(*goals, STEPS), "|---|---|---|---|---|---|---|---|---|---|"]
    ddp = next((row.seconds(goals[-1]) for row in found if row.contender == DDP), math.nan)
    lines += [line(row, goals, ddp) for row in found]
    return [*lines, ""]


def line(row: Row, goals: Sequence[float], ddp: float) -> str:
    """Return a line of a table."""
    times = [time_to(row, goal) for goal in goals]
    last = row.seconds(goals[-1])
    gain = f"{ddp / last:.2f} ×" if math.isfinite(last) else "–"
    sent = row.bytes(goals[-1]) / 1e6
    total = f"{sent:,.1f}" if math.isfinite(sent) else "–"
    final = row.final()
    ended = f"{final:.3f}" if math.isfinite(final) else "diverged"
    cells = [row.contender.name, f"{row.lr:g}", f"{row.step * 1e3:.0f}", f"{row.sent / 1e6:.3f}", *times]
    return "| " + " | ".join([*cells, gain, total, ended]) + " |"


def time_to(row: Row, goal: float) -> str:
    """Return the seconds to a loss and half their range over seeds; a dash for what was never reached."""
    if not math.isfinite(seconds := row.seconds(goal)):
        return "–"
    half = row.half_range(goal) if len(row.curves) > 1 else 0.0
    return f"{seconds:.0f}" + (f" ± {half:.0f}" if half else "").replace("inf", "–")


def checked(losses: Table, timings: Table) -> list[str]:
    """Return the table of trainings on a network itself, beside their composed times."""
    found = compose.checks(losses, timings)
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
