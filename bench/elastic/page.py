"""The page about ranks that come and go: bench/elastic/README.md."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.network.page import machine
from bench.network.table import RESULTS, Table

from . import __doc__ as about
from .cells import ALGORITHMS, CALM, HANG, KILLS, SECONDS, TIMEOUT, cells

PAGE, PICTURE = Path(__file__).parent / "README.md", RESULTS / "elastic.png"
HEAD = """# Ranks that are killed and replaced

This page is written by `python -m bench.elastic page` from the lines of JSON in `bench/results/`; do not edit it.

"""
COLUMNS = ("", "kills", "goodput", "survivors", "newcomers", "bits of loss", "undisturbed", "replicas")


def write(table: Table) -> Path:
    """Write the page from what has been measured, and return its path."""
    parts = [HEAD + str(about).partition("\n\n")[2]]
    if any(cell["event"] in KILLS for cell, _ in table):
        draw(table).savefig(PICTURE, dpi=150)
        parts.append(f"![Steps a second and ranks, by time]({os.path.relpath(PICTURE, PAGE.parent)})\n")
    for event in KILLS:
        rows = [row(table, cell) for cell in cells() if cell["event"] == event and cell in table]
        if rows:
            parts.append(f"## {event.capitalize()}\n\nTimes are the median and the worst, in seconds.\n")
            parts.append("\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows, ""]))
    for cell, found in table:
        if cell["event"] == HANG:
            parts.append(
                f"## A rank hangs\n\n`{cell['algorithm']}`, with `timeout={TIMEOUT:g}`: the others step again "
                f"{found['survivors_median']:.1f} s after it has stopped; once it goes on, it learns that it was left "
                f"out, and trains again {found['newcomer_median']:.1f} s later.\n"
            )
    if table.machines:
        parts.append(f"On {'; '.join(map(machine, table.machines))}.\n")
    PAGE.write_text("\n".join(parts))
    return PAGE


def row(table: Table, cell: Mapping[str, Any]) -> str:
    """Return the row of a cell."""
    found, calm = table[cell], calm_of(table, cell)
    equal = next(each.equal for each in ALGORITHMS if each.algorithm == cell["algorithm"])
    words = [f"`{cell['algorithm']}`", str(found["kills"])]
    words.append(f"{goodput(found, cell['hosts']):.0%}")
    words += [f"{found[f'{who}_median']:.1f}, {found[f'{who}_worst']:.1f}" for who in ("survivors", "newcomer")]
    same = calm is not None and cell["seconds"] == SECONDS
    words += [f"{found['loss']:.3f}", f"{calm['loss']:.3f}"] if calm and same else ["", ""]
    words.append(("equal" if not found["different"] else f"{found['different']} differ") if equal else "")
    return f"| {' | '.join(words)} |"


def calm_of(table: Table, cell: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what was found without a disturbance."""
    calm = {**cell, "event": CALM, "seconds": SECONDS}
    return next((found for other, found in table if other == calm), None)


def goodput(found: Mapping[str, Any], hosts: int) -> float:
    """Return the steps that were made ÷ those of as many undisturbed seconds of ranks, in the same run."""
    first, last = found["events"][0], found["events"][-1]
    again = math.ceil(last["at"] + max(last["survivors"], last["newcomer"])) + 1
    counts = found["steps_by_second"]
    calm = counts[1 : int(first["at"])] + counts[again:-1]  # the seconds at both ends are not whole
    return float(found["steps"] / found["rank_seconds"] / (sum(calm) / len(calm) / hosts))


def draw(table: Table) -> Figure:
    """Return the picture: steps a second of all ranks, and how many ranks there are, by time."""
    shown = [cell for cell in cells() if cell["event"] == next(iter(KILLS)) and cell in table]
    figure = Figure(figsize=(11, 1.6 * max(len(shown), 1) + 0.6), layout="constrained")
    panels = figure.subplots(max(len(shown), 1), 1, sharex=True, squeeze=False)[:, 0]
    for panel, cell in zip(panels, shown, strict=False):
        found = table[cell]
        panel.plot(found["steps_by_second"], lw=0.9, color="tab:blue")
        panel.set_title(cell["algorithm"], loc="left", fontsize=9)
        panel.set_ylabel("steps / s", color="tab:blue", fontsize=8)
        panel.set_ylim(bottom=0)
        ranks = panel.twinx()
        known = [(second, n) for second, n in enumerate(found["ranks_by_second"]) if n is not None]
        ranks.step(*zip(*known, strict=True), where="post", lw=0.9, color="tab:orange")
        ranks.set_ylim(0, cell["hosts"] + 1)
        ranks.set_ylabel("ranks", color="tab:orange", fontsize=8)
        for event in found["events"]:
            panel.axvline(event["at"], color="tab:red", lw=0.7, ls=":")
    panels[-1].set_xlabel("seconds; a dotted line is a kill")
    return figure
