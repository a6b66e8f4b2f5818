"""The page bench/control/README.md."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.network.page import machine
from bench.network.table import Table

from . import __doc__ as about
from .cells import JUDGE, LOST, SIZES, slow_cell

PAGE = Path(__file__).parent / "README.md"
HEAD = """# Failure detection with 512 ranks

This page is written by `python -m bench.control page` from the lines of JSON in `bench/results/`; do not edit it.

"""
COLUMNS = (
    "ranks",
    "requests of a rank",
    "of the judge",
    "of all",
    "a request takes",
    "a lost rank is named after",
    "the lost judge",
    "an agreement takes",
)


def write(table: Table, page: Path = PAGE) -> Path:
    """Write the page from what has been measured, and return its path."""
    parts = [HEAD + str(about).partition("\n\n")[2]]
    rows = [row(table, size) for size in SIZES if {"ranks": size, "lost": LOST} in table]
    if rows:
        parts.append(
            "Requests are those of a second. Times of requests are the median and the one that 99 % do not exceed. "
            "Times after which a rank is named are the median of all ranks, and the last one's.\n"
        )
        parts.append("\n".join([f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows, ""]))
    cell, _ = slow_cell()
    if cell in table:
        parts.append(slow(cell, table[cell]))
    if table.machines:
        parts.append(f"On {'; '.join(map(machine, table.machines))}.\n")
    page.write_text("\n".join(parts))
    return page


def row(table: Table, size: int) -> str:
    """Return the row of so many ranks."""
    found, judge = table[{"ranks": size, "lost": LOST}], {"ranks": size, "lost": JUDGE}
    words = [f"{size}", f"{found['each']:.2f}", f"{found['judge']:.2f}", f"{found['all']:,.0f}"]
    words.append(f"{1e3 * found['request_median']:.1f} ms, {1e3 * found['request_99']:.1f}")
    words.append(times(found))
    words.append(times(table[judge]) if judge in table else "")
    words.append(f"{found['agreement']:.2f} s")
    return f"| {' | '.join(words)} |"


def times(found: Mapping[str, Any]) -> str:
    """Return when most ranks and when all knew which rank is lost."""
    return f"{found['named']:.1f} s, {found['last']:.1f}"


def slow(cell: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return the paragraph about the slow store."""
    alarms, took = found["alarms"], [f"{1e3 * found[name]:.0f} ms" for name in ("request_median", "request_99")]
    ended = f"{alarms} ranks gave up: {found['said']}" if alarms else "no rank was taken for dead"
    return (
        f"## A slow store\n\n{cell['ranks']} ranks waited for {found['seconds'] / 60:.0f} minutes. Each request took "
        f"{cell['slower']} times as long as without that: {took[0]} in the median, and 99 % no longer than {took[1]}. "
        f"A rank made {found['each']:.2f} requests a second, and {ended}.\n"
    )
