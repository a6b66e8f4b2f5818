"""The predictions of all operations: executed and checked, as JSON, as a table and as a picture."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .model import CLOCK, COPY, MULTIPROCESSORS, RATES, SCHEDULERS, WARP, instructions_a_byte, predict
from .reasons import TARGET, reason_of
from .work import Operation, operations

ROOT = Path(__file__).parents[2]
ARCH = 90
NAME = "roofline-predicted"
# Written by `EXECUTED_COUNTS=bench/results/executed.jsonl scripts/test tests/kernels/test_executed_here.py -m slow`.
COUNTS = ROOT / "bench" / "results" / "executed.jsonl"


def predictions(n: int, chosen: Iterable[Operation] | None = None) -> dict[str, Any]:
    """Execute operations on `n` values, compare each result with its definition, and predict how long each takes."""
    from triton import knobs

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 interprets kernels, which then are not compiled; unset it")
    from ptx.driver import executed
    from ptx.watching.counters import Counters

    counted: list[Any] = []
    rows = []
    with executed(ARCH, watchers=(functools.partial(Counters, counted),)):
        for operation in operations() if chosen is None else chosen:
            task = operation.ready(n)
            counted.clear()
            task.check()
            row = predict(counted, n, task.floor, task.moves or task.floor)
            named = {"family": operation.family, "name": operation.name, "dtype": operation.dtype}
            rows.append(named | {"launches": len(counted)} | row)
            reason_of(rows[-1])  # raises if it is below the target without a reason
    return {"kind": "predicted", "arch": ARCH, "values": n, "rows": rows}


def save(found: dict[str, Any], out: Path) -> Path:
    """Write JSON and picture; return the path of the JSON."""
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{NAME}.json"
    rows = ",\n".join(map(json.dumps, found["rows"]))
    about = json.dumps({name: value for name, value in found.items() if name != "rows"})
    path.write_text(f'{about[:-1]}, "rows": [\n{rows}\n]}}\n')
    try:
        draw(found).savefig(path.with_suffix(".png"), dpi=110)
    except ImportError:
        print("no picture: matplotlib is not installed")
    return path


HEAD = """## *Predicted*, not measured: an H200

The PTX that Triton generates for the kernels is executed in NumPy (`ptx`) on {values:,} values; each result is
compared with its definition, and what it took is counted. On an H100 (the comparison above) the counters saw as many
sectors as predicted; kernels bound by memory reached 0.81 to 1.04 of the predicted speed, and those bound by
instructions 0.70 to 0.83, but for the average of signs, 1.18. A kernel is predicted to take as long as the slowest of

* memory: {copy} TB/s, the speed of a large copy;
* the first cache and shared memory: 128 bytes a clock and multiprocessor;
* the schedulers: {sms} multiprocessors × {schedulers} × {warp} lanes × {clock} GHz, which is {budget:.1f} instructions
  of single lanes while memory moves a byte;
* each pipe, by its results a clock and multiprocessor (CUDA C++ Programming Guide, compute capability 9.0): {rates}.

Launches are not in it, nor latency that too few warps hide. `bench/predicted/model.py` says what an instruction of PTX
takes. *Distinct* are the sectors of 32 bytes that a launch touches, *requested* those that its instructions touch,
summed over warps: both relative to the bytes that the kernels' algorithm moves. *Bound by* is the slowest part.
"""
COLUMNS = ("", "dtype", "bytes a value (least)", "distinct", "requested", "instructions a byte", "bound by")
COLUMNS += ("*predicted* share of a copy", "why below 0.9")


def lines(found: dict[str, Any], picture: bool) -> list[str]:
    """Return the lines of a page."""
    rates = ", ".join(f"{name} {rate}" for name, rate in RATES.items())
    head = HEAD.format(
        values=found["values"], copy=COPY / 1e12, sms=MULTIPROCESSORS, schedulers=SCHEDULERS, warp=WARP,
        clock=CLOCK / 1e9, budget=instructions_a_byte(), rates=rates,
    )  # fmt: skip
    shown = [f"![*Predicted* share of a copy's speed of every kernel](results/{NAME}.png)", ""] if picture else []
    table = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *map(_line, found["rows"]), ""]
    return [head, *counts(), *shown, *table]


def counts(path: Path = COUNTS) -> list[str]:
    """Return the lines on what the tests have executed, from the counts in a file."""
    if not path.exists():
        return []
    each = [json.loads(line) for line in path.read_text().splitlines()]
    totals = {
        arch: (
            sum(e["launches"] for e in each if e["arch"] == arch),
            sum(e["tests"] for e in each if e["arch"] == arch),
        )
        for arch in sorted({e["arch"] for e in each})
    }
    return [
        "Tests of kernels execute them likewise, on hostile values, and compare what they write with the definitions.",
        "All are equal, byte for byte:",
        "",
        *(f"* sm_{arch}: {launches:,} launches in {tests:,} tests." for arch, (launches, tests) in totals.items()),
        "",
    ]


def _line(row: dict[str, Any]) -> str:
    least = "" if row["bytes"] == row["floor"] else f" ({row['floor']:.2f})"
    return (
        f"| {row['family']}: {row['name']} | {row['dtype']} | {row['bytes']:.2f}{least} | {row['distinct']:.3f} | "
        f"{row['requested']:.2f} | {row['instructions']:.2f} | {row['bound']} | *{row['share']:.2f}* | "
        f"{reason_of(row) or ''} |"
    )


def draw(found: dict[str, Any]) -> Any:
    """Draw the predicted share of each operation as a bar, in colours by what it is bound by."""
    from baguakit.pictures import COLOURS, blank, set_frame

    rows = found["rows"]
    figure = blank(8.5, 0.17 * len(rows) + 1.2)
    axes = figure.subplots()
    bounds = sorted({row["bound"] for row in rows}, key=lambda name: (name != "memory", name))
    for colour, bound in zip(COLOURS, bounds, strict=False):
        some = [(at, row["share"]) for at, row in enumerate(rows) if row["bound"] == bound]
        axes.barh([at for at, _ in some], [share for _, share in some], color=colour, label=f"bound by {bound}")
    axes.set_yticks(range(len(rows)), [f"{row['family']}: {row['name']}, {row['dtype']}" for row in rows], fontsize=6)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.axvline(TARGET, color="black", linewidth=0.8, linestyle="--")
    set_frame(axes)
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("share of a copy's bytes a second: predicted for an H200, not measured", fontsize=8)
    axes.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    return figure
