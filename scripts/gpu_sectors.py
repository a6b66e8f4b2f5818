"""Count the sectors and bytes that each operation of `bench.speed` moves, by Nsight Compute (`ncu`).

    python scripts/gpu_sectors.py NAMES

It runs every operation once and marks where each begins: `counted` lets ncu run it, and reads what ncu writes.
"""

import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VALUES = 1 << 20  # that operations work on
MARK = "spin_kernel"  # of torch.cuda._sleep: launched before each operation, whose kernels follow it
SECTORS = tuple(f"l1tex__t_sectors_pipe_lsu_mem_global_op_{kind}.sum" for kind in ("ld", "st"))
BYTES = tuple(f"dram__bytes_{kind}.sum" for kind in ("read", "write"))
SECONDS = 95


def counted() -> dict[str, dict[str, float]] | str:
    """Return "sectors" and "bytes" a value by "family, name", or the reason why ncu counts none here."""
    if (ncu := which("ncu")) is None:
        return "Nsight Compute (ncu) is not on the PATH"
    with tempfile.TemporaryDirectory() as room:
        names = Path(room) / "names"
        options = ["--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
        options += ["--clock-control", "none"]  # the clocks belong to all who use the machine, and nothing is timed
        command = [ncu, *options, "--metrics", ",".join((*SECTORS, *BYTES)), sys.executable, __file__, names]
        try:
            ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"ncu did not end within {SECONDS} s"
        lines = ran.stdout.splitlines()
        start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
        if ran.returncode or start is None or not names.exists():
            said = [line for line in (ran.stdout + ran.stderr).splitlines() if line.startswith("==ERROR==")]
            return f"ncu ended with {ran.returncode}" + (f", {said[0]}" if said else "")
        try:
            return sums(csv.DictReader(lines[start:]), json.loads(names.read_text()))
        except (KeyError, ValueError) as error:  # another version of ncu may write another table
            return f"the table of ncu was not understood, {type(error).__name__}: {error}"


def sums(rows: Iterable[Mapping[str, str]], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Add up what the kernels of each operation move, a value; a row of units comes first.

    Raises:
        ValueError: there are not as many marks as operations.
    """
    found: list[dict[str, float]] = []
    for row in rows:
        if not row["ID"]:
            continue
        if MARK in row["Kernel Name"]:
            found.append({"sectors": 0.0, "bytes": 0.0})
        elif found:
            found[-1]["sectors"] += sum(number(row[name]) for name in SECTORS) / VALUES
            found[-1]["bytes"] += sum(number(row[name]) for name in BYTES) / VALUES
    if len(found) != len(names):
        raise ValueError(f"{len(names)} operations were run, and ncu saw {len(found)}")
    return dict(zip(names, found, strict=True))


def number(text: str) -> float:
    return float(text.replace(",", ""))


def main(words: Sequence[str]) -> None:
    """Run every operation once, and write their names."""
    import torch

    from bench.speed import operations

    names: list[Any] = []
    for operation in operations():
        work = operation.ready(VALUES, "cuda")
        work()  # it is compiled here
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        torch.cuda._sleep(1)
        work()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
        names.append(f"{operation.family}, {operation.name}")
    Path(words[0]).write_text(json.dumps(names))


if __name__ == "__main__":
    main(sys.argv[1:])
