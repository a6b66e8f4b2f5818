"""Presentation of measurements: a picture of shares and latencies, and the page bench/README.md."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from .predicted import table
from .roofline_picture import roofline

Rows = list[dict[str, Any]]

PAGE = """# Benchmarks

This page is written by `python -m bench.roofline --page` from the JSON in `bench/results/`; do not edit it.

    make bench                        every benchmark: pytest --benchmark
    python -m bench.roofline          every kernel, from 2^10 values on, against the speed of a copy
    python -m bench.roofline --predicted   what an H200 or H100 would take, from the code that it would execute
    scripts/gpu OUTDIR [PART…]        on a GPU: the tests, the benchmarks and the roofline; JSON in OUTDIR
    python -m bench.step_profile      where a step of bytegrad spends its time, on the host and on the device
    python -m bench.network           steps of training over slow links, on hosts that are network namespaces (root)
    python -m bench.frontier          seconds and bytes to the same loss of a language model, ours and peers
    python -m bench.frontier.speeds   the same, and goodput, of four hosts of unequal speed (root)
    python -m bench.frontier.by_ranks what few averages cost in quality, with 2 to 16 ranks
    python -m bench.elastic           steps, and seconds to the next one, while ranks are killed and replaced (root)
    python -m bench.elastic.unequal   goodput of four hosts of unequal speed, one of them killed every 60 s (root)
    python -m bench.elastic.edges     eight hosts, one of them late, stopped or killed: synchronous and one-sided (root)
    python -m bench.control measure   requests to the store, and seconds to name a lost rank, with up to 512 ranks
    python -m bench.netlab -- CMD     such hosts for a program of your own (root)
    python -m bench.first_use         what the first use of a kernel on a CPU waits for the C compiler
    python -m bench.memory            memory that each algorithm takes beside the model
    python -m bench.scaling           the planner's steps on up to 1,024 nodes, beside published figures
    python -m bench.scaling.many      one rank of up to 16,384, counted, and up to 64 real ranks on one machine
    python -m bench.accuracy          errors and biases of all formats, beside MXFP8, MXFP4 and NVFP4
    python -m bench.exchange page     means in one kernel over 8 GPUs, predicted from what the executor counts

A benchmark checks its result before it prints a speed. Speeds are shares of a copy timed in the same run: of its bytes
a second, each counting what it must at least read and write. Eight questions have pages of their own: [seconds to the
same loss](frontier/README.md), steps of training over [slow networks](network/README.md), [ranks that come and
go](elastic/README.md), [accuracy of formats](accuracy/README.md), [scale, on paper](scaling/README.md), [many
ranks](scaling/many/README.md), [failure detection](control/README.md), and [means in one kernel](exchange/README.md).
"""


def families(rows: Rows) -> dict[str, dict[str, Rows]]:
    """Rows by family, and in it by name."""
    found: dict[str, dict[str, Rows]] = {}
    for row in rows:
        found.setdefault(row["family"], {}).setdefault(row["name"], []).append(row)
    return found


def draw(measured: dict[str, Any], path: Path) -> None:
    """Save a picture: for each family the share of the copy's speed, and how long a call takes, by size."""
    roofline(measured).savefig(path, dpi=110)


def write_page(results: Path) -> Path:
    """Write README.md beside the folder of results, and return its path."""
    parts = [PAGE]
    for path in sorted(results.glob("*.json")):
        measured = json.loads(path.read_text())
        kind = measured.get("kind") if isinstance(measured, dict) else None
        if kind == "roofline":
            parts.append(_measured(path, measured))
        elif kind == "comparison":
            parts.append("\n".join(comparison(measured)))
        elif kind == "gpu":
            parts.append("\n".join(ran(measured)))
        elif kind == "predicted":
            parts.append("\n".join(table.lines(measured, picture=path.with_suffix(".png").exists())))
    page = results.parent / "README.md"
    page.write_text("\n".join(parts))
    return page


def _measured(path: Path, measured: dict[str, Any]) -> str:
    machine = measured["machine"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "triton", "cuda", "python") if machine[name])
    before, after = measured["copy_gb_per_s"]
    lines = [
        f"## Measured: {machine['device']}",
        "",
        f"{machine['processor']}; {versions}; {machine['date']}. A copy ran at {before} GB/s before and {after} after.",
        f"Checked against the definition up to {measured['checked_to']:,} values.",
    ]
    if not measured["complete"]:
        lines.append("The time allowed was over before the last size.")
    if machine["device"].startswith("CPU"):
        lines.append("On a CPU the kernels are in C.")
    if path.with_suffix(".png").exists():
        lines += [
            "",
            f"![Share of a copy's speed, and time of a call, by size](results/{path.with_suffix('.png').name})",
        ]
    lines += [
        "",
        "| | bytes a value | a call of the smallest size | at the largest size | share of the copy there |",
        "|---|---|---|---|---|",
    ]
    for family, names in families(measured["rows"]).items():
        for name, rows in names.items():
            first, last = rows[0], rows[-1]
            lines.append(
                f"| {family}: {name} | {last['bytes'] / last['values']:.2f} | {first['seconds'] * 1e6:.1f} µs "
                f"({first['values']:,} values) | {last['bytes'] / last['seconds'] / 1e9:.2f} GB/s "
                f"({last['values']:,} values) | {last['share']:.2f} |"
            )
    return "\n".join([*lines, ""])


HEADINGS = (
    ("values", "{:,}"),
    ("clock_mhz", "{:.0f}"),
    ("share", "{:.2f}"),
    ("predicted_share", "{:.2f}"),
    ("of_predicted", "{:.2f}"),
    ("sectors", "{:.3f}"),
    ("predicted_sectors", "{:.3f}"),
    ("bytes", "{:.2f}"),
    ("predicted_bytes", "{:.2f}"),
)


def comparison(found: Mapping[str, Any], level: int = 2) -> list[str]:
    """Return the lines of a comparison of `scripts/gpu`: the operation furthest below its prediction comes first.

    By hand may be added "about", a text about the prediction, and to a row "why" it is not met.
    """
    rows = sorted(found["rows"], key=lambda row: (row["of_predicted"] is None, row["of_predicted"] or 0.0))
    machine = found["machine"]
    lines = [
        f"{'#' * level} Measured and predicted: {machine['device']}",
        "",
        f"torch {machine['torch']}, triton {machine['triton']}, {machine['date']}. A copy ran at "
        f"{found['copy_gb_per_s'][0]:.0f} GB/s before and {found['copy_gb_per_s'][-1]:.0f} GB/s after. Shares are of "
        "that speed, and predicted for it; sectors and bytes are of one value in fp32."
        + f" {found.get('about', '')}".rstrip(),
        "",
        *([f"Sectors and bytes were not counted: {found['counted']}.", ""] if found["counted"] else []),
        "| operation | " + " | ".join(key.replace("_", " ") for key, _ in HEADINGS) + " | why |",
        "|---" * (len(HEADINGS) + 2) + "|",
    ]
    for row in rows:
        cells = ["–" if row[key] is None else form.format(row[key]) for key, form in HEADINGS]
        lines.append(f"| {row['operation']} | " + " | ".join([*cells, row.get("why", "")]) + " |")
    return [*lines, ""]


def ran(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of results.json of `scripts/gpu`: its parts and benchmarks.

    By hand may be added "about", a text about the run, and "variants", rows of launches side by side.
    """
    machine, parts = found["machine"], found["parts"]
    versions = ", ".join(f"{name} {machine[name]}" for name in ("driver", "cuda", "nccl", "torch", "triton", "python"))
    lines = [
        f"## What ran on {', '.join(machine['gpu'])}",
        "",
        f"{versions}; {machine['date']}. {found.get('about', '')}".rstrip(),
        "",
    ]
    lines += ["| part of `scripts/gpu` | | seconds | |", "|---|---|---|---|"]
    for name, part in parts.items():
        facts = part["found"] if isinstance(part["found"], dict) else {}
        plain = {key: value for key, value in facts.items() if isinstance(value, (int, float))}
        said = ", ".join(f"{key} {value:.4g}" for key, value in plain.items() if not isinstance(value, bool))
        lines.append(f"| {name} | {part['status']} | {part['seconds']:.0f} | {said} |")
    if rows := ((parts.get("benchmarks") or {}).get("found") or {}).get("benchmarks"):
        lines += ["", "| benchmark | median | beside a limit or a peer | verified |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(row[key] for key in ('name', 'median', 'beside', 'verified'))} |" for row in rows]
    for name, part in parts.items():
        lines += FIGURES[name](part["found"]) if name in FIGURES else []
    if rows := found.get("variants"):
        lines += ["", "| operation on 64 Mi values | options | share of the copy | predicted |", "|---|---|---|---|"]
        lines += [
            f"| {row['operation']} | {row['options']} | {row['share']:.2f} | {row.get('predicted', '')} |"
            for row in rows
        ]
    return [*lines, ""]


def of_mesh(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence about the part `mesh`."""
    cases = found["cases"]
    far, farthest = max((case["off gloo"], name) for name, case in cases.items())
    equal, good = sum(case["ranks equal"] for case in cases.values()), sum(case["ok"] for case in cases.values())
    return [
        "",
        f"**mesh**: {found['ranks']} ranks, as 2 nodes; {good} of {len(cases)} cases hold. In {equal} of them ranks "
        f"that should be equal are, bit for bit; beside gloo the weights are off by at most {far:.2g} of how far "
        f"training moved them (`{farthest}`), and all others by at most "
        f"{sorted(case['off gloo'] for case in cases.values())[-2]:.2g}.",
    ]


def of_real(found: Mapping[str, Any]) -> list[str]:
    """Return the table of the part `real`: seconds of a step, and how many times as fast as DDP that is."""
    cells = {(cell["contender"], cell["rate"]): cell for cell in found["cells"]}
    names, rates = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))

    def seconds(name: str, rate: str) -> float | None:
        cell = cells.get((name, rate))
        return cell and cell.get("every 500", median(cell["seconds"]))

    def shown(name: str, rate: str) -> str:
        took, ddp = seconds(name, rate), seconds("DDP", rate)
        if took is None:
            return "–"
        return f"{took:.3g} s ({ddp / took:.1f} ×)" if ddp else f"{took:.3g} s"

    return [
        "",
        f"**real**: a step of a GPT of {found['values'] / 1e6:.0f} million values on {found['ranks']} ranks, median of "
        "three, and how many times as fast as DDP; DiLoCo with an exchange every 500 steps.",
        "",
        f"| | {' | '.join(rates)} |",
        "|---|" + "---|" * len(rates),
        *(f"| {name} | {' | '.join(shown(name, rate) for rate in rates)} |" for name in names),
    ]


def of_overlap(found: Mapping[str, Any]) -> list[str]:
    """Return the table of the part `overlap`, medians of its rounds."""
    rounds: dict[str, list[dict[str, float]]] = {}
    for name, facts in found.items():
        if isinstance(facts, dict):
            rounds.setdefault(name.rpartition(", round ")[0], []).append(facts)
    columns = list(dict.fromkeys(key for each in rounds.values() for key in each[0]))
    return [
        "",
        f"**overlap**: steps with {found['megabytes']:.0f} MB of gradients; the number is the priority of the lane's "
        "stream; nodes are 2 of 2 ranks; the ms are means over buckets.",
        "",
        f"| | {' | '.join(columns)} |",
        "|---|" + "---|" * len(columns),
        *(
            f"| {name} | "
            + " | ".join(f"{median(r[key] for r in each):.3g}" if key in each[0] else "–" for key in columns)
            + " |"
            for name, each in rounds.items()
        ),
    ]


def of_plugin(found: Mapping[str, Any]) -> list[str]:
    """Return a sentence about the rates in the part `plugin`."""
    rates = [
        f"{name}: {each['bytes a second'] / 1e6:.0f} MB/s" for name, each in found.items() if "sockets" in str(each)
    ]
    return ["", f"**plugin**, under a cap of {found['cap'] / 1e6:.0f} MB/s on each connection: {'; '.join(rates)}."]


FIGURES = {"mesh": of_mesh, "real": of_real, "overlap": of_overlap, "plugin": of_plugin}
