"""Compare the speed of every kernel, as a share of that of a copy, with the predicted share.

    python scripts/gpu_compare.py OUT [--facts FACTS] [--cpu]

It reads OUT/roofline-gpu.json of `bench.roofline` and bench/results/roofline-predicted.json, and writes
OUT/comparison.json and OUT/comparison.md. Where Nsight Compute is on the machine, it also counts the sectors and bytes
that the kernels move. If one of the files is missing, it says so. `--cpu` reads the measurements of a CPU, for a trial.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gpu_sectors

from bench.pages import comparison
from bench.predicted.model import GPU, GPUS

ROOT = Path(__file__).resolve().parents[1]
PREDICTED = ROOT / "bench" / "results" / "roofline-predicted.json"
SECTOR = 32  # bytes
# Primitives are measured, and predicted are their kernels.
KERNELS = {"optimizer, sgd with momentum": "optimizer, sgd_step_", "optimizer, adamw": "optimizer, adamw_step_"}
Row = Mapping[str, Any]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--facts", type=Path, help="a file for the comparison, too")
    parser.add_argument("--cpu", action="store_true", help="compare the measurements of a CPU")
    parser.add_argument("--predicted", type=Path, default=PREDICTED, help="the predicted shares")
    asked = parser.parse_args(words)
    measured = asked.out / f"roofline-{'cpu' if asked.cpu else 'gpu'}.json"
    for path, source in (
        (measured, "the part `roofline`"),
        (asked.predicted, "`python -m bench.roofline --predicted`"),
    ):
        if not path.exists():
            said = f"{source} writes {path.name}, which is missing"
            write(asked.facts, {"not compared": said})
            print(said)
            return 0
    first, second = (json.loads(path.read_text()) for path in (measured, asked.predicted))
    counted = "this is a CPU" if asked.cpu else gpu_sectors.counted()
    found = compared(first, second, counted)
    texts = {"comparison.json": json.dumps(found, indent=1) + "\n", "comparison.md": page(found)}
    for name, text in texts.items():
        (asked.out / name).write_text(text)
    write(asked.facts, found)
    print(texts["comparison.md"])
    return 0


def write(facts: Path | None, found: Mapping[str, Any]) -> None:
    if facts is not None:
        facts.write_text(json.dumps(found))


def compared(
    measured: Mapping[str, Any], predicted: Mapping[str, Any], counted: Mapping[str, Row] | str
) -> dict[str, Any]:
    """Put the measured share of a copy's speed beside the predicted one, and what was counted beside what was.

    Args:
        measured: of `bench.roofline`; of each operation its largest size counts.
        predicted: of `bench.roofline --predicted`; its rows in fp32 count, as only fp32 is measured. It gives sectors
            relative to those that the bytes fill.
        counted: "sectors" and "bytes" a value by "family, name", or the reason why nothing was counted.
    """
    largest = {name_of(row): row for row in sorted(measured["rows"], key=lambda row: row["values"])}
    expected = {name_of(row): row for row in predicted["rows"] if row["dtype"] == "fp32"}
    names = [*largest, *(name for name in expected if name not in largest)]
    copy = sum(measured["copy_gb_per_s"]) / len(measured["copy_gb_per_s"]) * 1e9
    gpu = like(measured["machine"]["device"], copy).name
    seen = {} if isinstance(counted, str) else counted
    return {
        "kind": "comparison",
        "machine": measured["machine"],
        "copy_gb_per_s": measured["copy_gb_per_s"],
        "counted": counted if isinstance(counted, str) else None,
        "rows": [beside(name, largest.get(name), expected.get(name), seen.get(name, {}), gpu) for name in names],
    }


def name_of(row: Row) -> str:
    name = f"{row['family']}, {row['name']}"
    return KERNELS.get(name, name)


def beside(name: str, measured: Row | None, predicted: Row | None, counted: Row, gpu: str) -> dict[str, Any]:
    """Return the figures of an operation beside those predicted for a GPU; None is for what is not known."""
    share = measured["share"] if measured else None
    # The prediction counts all bytes that a kernel moves, and the measurement those that it must.
    expected = predicted[gpu]["share"] * predicted["floor"] / predicted["bytes"] if predicted else None
    return {
        "operation": name,
        "values": measured["values"] if measured else None,
        "clock_mhz": measured.get("clock_mhz") if measured else None,
        "share": share,
        "predicted_share": expected,
        "of_predicted": share / expected if share is not None and expected else None,
        "sectors": counted.get("sectors"),
        "predicted_sectors": predicted["requested"] * predicted["bytes"] / SECTOR if predicted else None,
        "bytes": counted.get("bytes"),
        "predicted_bytes": predicted["distinct"] * predicted["bytes"] if predicted else None,
    }


def like(device: str, copy: float) -> GPU:
    """Return the predicted GPU of a device's name, or else that whose copy's bytes a second are nearest."""
    return min(GPUS, key=lambda gpu: (gpu.name not in device, abs(gpu.copy - copy)))


def page(found: Mapping[str, Any]) -> str:
    """Return the comparison as Markdown."""
    return "\n".join(comparison(found, level=1))


if __name__ == "__main__":
    sys.exit(main())
