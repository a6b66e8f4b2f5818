"""The speed of every kernel relative to that of a copy, from a thousand values to hundreds of millions.

    python -m bench.roofline [--out FOLDER] [--largest 28] [--seconds 240]     measure, write JSON, draw
    python -m bench.roofline --predicted [--out FOLDER] [--largest 16]         execute and predict, where no GPU is
    python -m bench.roofline --page                                            write bench/README.md from bench/results

Each operation is checked against its definition at every size up to 2²⁰, and then timed: the median of some readings,
each of a millisecond or more, one call after another on the same tensors. The roof is a copy of 2²⁶ values on a GPU and
2²⁴ on a CPU, before and after all else. Tensors that fit in a cache are read from there, so that a small size may lie
above the roof. After the smallest size come the largest and those below it, until `--seconds` have passed.

`--predicted` executes every kernel's PTX on 2¹⁶ values, or 2 to the power of `--largest` if that is less, and predicts
what an H200 and an H100 take: see `bench.predicted.model`. `python -m bench.predicted` shows single rows.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from .measuring import DEVICE, GPU, clock_of, copy_of, machine, seconds
from .pages import draw, write_page
from .predicted import table
from .speed import drawn, operations

RESULTS = Path(__file__).parent / "results"
SMALLEST, STEP = 10, 2  # exponents of two
CHECKED = 20
PREDICTED = 16
ROOF = 26 if GPU else 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS, help="where JSON and picture go")
    parser.add_argument("--largest", type=int, default=28 if GPU else 24, help="the largest size, as a power of two")
    parser.add_argument("--seconds", type=float, default=240.0, help="begin nothing new after so long")
    parser.add_argument("--predicted", action="store_true", help="measure nothing; predict from executed PTX")
    parser.add_argument("--page", action="store_true", help="measure nothing; write bench/README.md")
    asked = parser.parse_args()
    if asked.page:
        print(write_page(RESULTS))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if asked.predicted:
        found = table.predictions(1 << min(PREDICTED, asked.largest))
        print(f"wrote {table.save(found, asked.out)}")
        print("\n".join(table.lines(found, picture=False)))  # raises if a row is below the target without a reason
        return
    measured = measure_all(asked.largest, asked.seconds)
    if not measured["rows"]:
        sys.exit(f"nothing was measured in {asked.seconds:g} s; give --seconds more")
    path = asked.out / f"roofline-{'gpu' if GPU else 'cpu'}.json"
    path.write_text(json.dumps(measured, indent=1) + "\n")
    print(f"wrote {path}")
    try:
        draw(measured, path.with_suffix(".png"))
    except ImportError:
        print("no picture: matplotlib is not installed")
    report(measured)


def measure_all(largest: int, limit: float) -> dict[str, Any]:
    """Sizes in turn, those first that tell most, and at each all operations."""
    until, copy = time.monotonic() + limit, copy_of(1 << ROOF)
    roof = [8 * 2**ROOF / seconds(copy)]
    rows: list[dict[str, Any]] = []
    late = False
    for power in (SMALLEST, *reversed(range(SMALLEST + STEP, largest + 1, STEP))):
        for operation in operations():
            late = late or time.monotonic() > until
            if late:
                break
            if power <= CHECKED and not operation.is_right(1 << power, DEVICE):
                sys.exit(f"{operation.family}, {operation.name}: the result is not that of the definition")
            work = operation.ready(1 << power, DEVICE)
            taken = seconds(work, repeats=7, shortest=1e-3)
            row = {"family": operation.family, "name": operation.name, "values": 1 << power, "seconds": taken}
            clock = clock_of(work, taken) if power == largest else None
            rows.append(row | {"bytes": operation.bytes(1 << power), "clock_mhz": clock})
        drawn.cache_clear()
        gc.collect()
        print(f"2^{power}: {len(rows)} measured", flush=True)
    rows.sort(key=lambda row: row["values"])  # it is stable: operations keep their order
    roof.append(8 * 2**ROOF / seconds(copy))
    for row in rows:
        row["share"] = row["bytes"] / row["seconds"] / (sum(roof) / 2)
    return {
        "kind": "roofline",
        "machine": machine(),
        "copy_gb_per_s": [round(speed / 1e9, 2) for speed in roof],
        "checked_to": 1 << CHECKED,
        "complete": not late,
        "rows": rows,
    }


def report(measured: dict[str, Any]) -> None:
    """A line for each operation: a call of the smallest size, and the share of the roof at the largest."""
    print(f"{measured['machine']['device']}: copy {measured['copy_gb_per_s']} GB/s")
    by_name: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in measured["rows"]:
        by_name.setdefault((row["family"], row["name"]), []).append(row)
    for (family, name), rows in by_name.items():
        last = rows[-1]
        print(
            f"  {family + ', ' + name:<36} {rows[0]['seconds'] * 1e6:>9.1f} µs at {rows[0]['values']}, "
            f"{last['share']:>6.2f} of the copy at {last['values']}"
        )


if __name__ == "__main__":
    main()
