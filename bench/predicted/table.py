"""The predictions of all operations: executed and checked, as JSON, as a table and as a picture."""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .model import GPUS, H100, H200, IDLE, instructions_a_byte, predict
from .reasons import TARGET, reason_of
from .simulation import CLOCKS, LATENCY, SCHEDULERS, WARP
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


HEAD = """## *Predicted*, not measured: an H200 and an H100

The PTX that Triton generates for the kernels is executed in NumPy (`ptx`) on {values:,} values; each result is
compared with its definition, and what each line took is counted. NVIDIA's assembler, which Triton ships, makes machine
code for compute capability 9.0 of the PTX and says which instruction comes from which line. So the path of a warp is
known, and a multiprocessor that runs it is simulated, clock by clock (`bench/predicted/simulation.py`):

* its {schedulers} schedulers issue an instruction of {warp} lanes a clock each: {sms} multiprocessors at {clock} GHz
  issue {h200:.1f} instructions of single lanes while an H200's memory moves a byte, and {h100:.1f} of an H100's;
* an instruction keeps its pipe for so many clocks: {pipes};
* it issues when the assembler says that what it reads is there; loads from memory take {latency} clocks or more;
* memory moves one sector after another, {copies}: the speed of a large copy.

On an H100 (the comparison above) the counters saw as many sectors as were predicted. Launches are not in it.

*Distinct* are the sectors of 32 bytes that a launch touches, *requested* those that its instructions touch, summed over
warps: both relative to the bytes that the kernels' algorithm moves. *Bound by* is the part that is busy the longest,
or *waiting*, if none is for {idle} of the time. `python -m bench.predicted` shows the machine code of a row by opcode.
Of *changes* the least bytes are all of new and old values, the sectors in which a value differs, and what is packed.
"""
COLUMNS = ("", "dtype", "bytes a value (least)", "distinct", "requested", "instructions a value", "of them integer")
COLUMNS += ("bound by: H200", "H100", "*predicted* share of a copy: H200", "H100", f"why below {TARGET} on an H200")


def lines(found: dict[str, Any], picture: bool) -> list[str]:
    """Return the lines of a page."""
    head = HEAD.format(
        values=found["values"], schedulers=SCHEDULERS, warp=WARP, sms=H200.multiprocessors, clock=H200.clock / 1e9,
        h200=instructions_a_byte(H200), h100=instructions_a_byte(H100), latency=LATENCY["LDG"], idle=IDLE,
        pipes=", ".join(f"{name} {clocks:g}" for name, clocks in CLOCKS.items() if clocks),
        copies=" and ".join(f"{gpu.copy / 1e12:g} TB/s on an {gpu.name}" for gpu in GPUS),
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
    bounds, shares = ([row[gpu.name][key] for gpu in GPUS] for key in ("bound", "share"))
    cells = [
        f"{row['family']}: {row['name']}", row["dtype"], f"{row['bytes']:.2f}{least}", f"{row['distinct']:.3f}",
        f"{row['requested']:.2f}", f"{sum(row['pipes'].values()):.1f}", f"{row['pipes'].get('integer', 0):.1f}",
        *bounds, *(f"*{share:.2f}*" for share in shares), reason_of(row) or "",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def draw(found: dict[str, Any]) -> Any:
    """Draw the predicted share of each operation as a bar, in colours by what it is bound by."""
    from baguakit.pictures import COLOURS, blank, set_frame

    rows = found["rows"]
    figure = blank(8.5, 0.17 * len(rows) + 1.2)
    axes = figure.subplots()
    bounds = sorted({row["H200"]["bound"] for row in rows}, key=lambda name: (name != "memory", name))
    for colour, bound in zip(COLOURS, bounds, strict=False):
        some = [(at, row["H200"]["share"]) for at, row in enumerate(rows) if row["H200"]["bound"] == bound]
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
