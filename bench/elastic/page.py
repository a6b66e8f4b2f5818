"""The page about ranks that come and go: bench/elastic/README.md."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from baguakit.pictures import PALE, blank, set_frame, style_of
from bench.network.page import machine
from bench.network.table import RESULTS, Table

from . import __doc__ as about
from .cells import ALGORITHMS, CALM, HANG, HOSTS, KILLS, ONCE, SECONDS, TIMEOUT, cells
from .simulated import simulated
from .torchft_peer import NAME as TORCHFT

PAGE, PICTURE = Path(__file__).parent / "README.md", RESULTS / "elastic.png"
HEAD = """# Ranks that are killed and replaced

This page is written by `python -m bench.elastic page` from the lines of JSON in `bench/results/`; do not edit it.

"""
ACROSS, BEFORE, AFTER = 3, 5, 15  # panels in a row; seconds before and after a kill that the picture shows
DIPS = """In the first two seconds after a kill the ranks regroup, and few or none step. The process that replaces the
killed one joins meanwhile, so that the number of ranks hardly falls: in {full:,} of {seconds:,} seconds with steps,
steps had {hosts} ranks. The second dip, 4 to 6 seconds after a kill, is a garbage collection in each rank of the old
group: it frees the connections of that group, a few seconds after the change, and stops the rank's threads meanwhile.
It takes that long because all hosts share two cores.
"""
BUSY = " The two cores did other work as well, so that the speed varied within a run."
COLUMNS = ("", "kills", "goodput", "simulated", "survivors", "newcomers", "bits of loss", "undisturbed", "replicas")


def write(table: Table) -> Path:
    """Write the page from what has been measured, and return its path."""
    parts = [HEAD + str(about).partition("\n\n")[2]]
    if any(cell["event"] in KILLS for cell, _ in table):
        draw(table).savefig(PICTURE, dpi=150)
        parts.append(f"![Steps a second around each kill]({os.path.relpath(PICTURE, PAGE.parent)})\n")
        parts.append(full(table))
    for event in KILLS:
        rows = [row(table, cell) for cell in cells() if cell["event"] == event and cell in table]
        if rows:
            parts.append(
                f"## {event.capitalize()}\n\nTimes are the median and the worst, in seconds.{BUSY * (event == ONCE)}\n"
            )
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
    where = f", {cell['rate'].replace('mbit', ' Mb/s').replace('gbit', ' Gb/s')}" * (cell["event"] == ONCE)
    words = [f"`{cell['algorithm']}`{where}", str(found["kills"]), f"{goodput(found, cell['hosts']):.0%}"]
    words.append("" if cell["algorithm"] == TORCHFT else f"{simulated(cell, undisturbed(found, cell['hosts'])):.0%}")
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
    return float(found["steps"] / found["rank_seconds"] / undisturbed(found, hosts))


def undisturbed(found: Mapping[str, Any], hosts: int) -> float:
    """Return the steps that a rank makes in a second without kills."""
    first, last = found["events"][0], found["events"][-1]
    again = math.ceil(last["at"] + max(last["survivors"], last["newcomer"])) + 1
    counts = found["steps_by_second"]
    calm = counts[1 : int(first["at"])] + counts[again:-1]  # the seconds at both ends are not whole
    return sum(calm) / len(calm) / hosts


def draw(table: Table) -> Figure:
    """Return the picture: steps a second of all ranks around each kill, a panel for each algorithm."""
    shown = [cell for cell in cells() if cell["event"] == next(iter(KILLS)) and cell in table]
    figure = blank(9, 0.5 + 1.7 * -(-len(shown) // ACROSS))
    panels = figure.subplots(-(-len(shown) // ACROSS), ACROSS, sharex=True, squeeze=False).flatten()
    for panel, cell in zip(panels, shown, strict=False):
        found, colour = table[cell], style_of(cell["algorithm"])["color"]
        for event in found["events"]:
            kill = round(event["at"])
            counts = found["steps_by_second"][kill - BEFORE : kill + AFTER]
            panel.stairs(counts, range(-BEFORE, len(counts) - BEFORE + 1), color=colour, baseline=None, alpha=0.7)
        panel.axvline(0, color=PALE, linewidth=0.8, linestyle=":")
        panel.set_title(cell["algorithm"], loc="left", fontsize=8)
        panel.set_ylim(bottom=0)
        set_frame(panel)
    for panel in panels[len(shown) :]:
        panel.set_visible(False)
    figure.supxlabel("seconds after a kill; each line is one of four kills", fontsize=9)
    figure.supylabel("steps a second, of all ranks", fontsize=9)
    return figure


def full(table: Table) -> str:
    """Return a sentence about the number of ranks in the seconds in which steps were made."""
    of_kills = [found for cell, found in table if cell["event"] in KILLS and cell["hosts"] == HOSTS]
    ranks = [n for found in of_kills for n in found["ranks_by_second"] if n is not None]
    return DIPS.format(full=sum(n == HOSTS for n in ranks), seconds=len(ranks), hosts=HOSTS)
