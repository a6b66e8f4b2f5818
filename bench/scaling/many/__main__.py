"""`python -m bench.scaling.many`: see `bench.scaling.many`."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.network.table import RESULTS

from . import machine, measures, page


def main(words: Sequence[str] | None = None) -> int:
    """Count, measure, or write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling.many", description="The cost of a rank of many.")
    parser.add_argument("what", nargs="?", choices=("one", "all", "page"), default="page")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="(%(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="numbers of ranks")
    asked = parser.parse_args(words)
    asked.out.mkdir(parents=True, exist_ok=True)
    if asked.what == "one":
        rows = []
        for name in measures.ALGORITHMS:
            for size in asked.sizes or measures.SIZES:
                rows.append(measures.measured(name, size))
                print(json.dumps(rows[-1]), flush=True)
        (asked.out / "many-one.json").write_text(json.dumps(rows, indent=1) + "\n")
    if asked.what == "all":
        found = [row for size in asked.sizes or machine.SIZES for row in machine.measured(size)]
        facts = {"cores": len(os.sched_getaffinity(0)), "repeats": machine.REPEATS, "rows": found}
        (asked.out / "many-all.json").write_text(json.dumps(facts, indent=1) + "\n")
    if asked.out == RESULTS:
        print(f"The page is {page.write(RESULTS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
