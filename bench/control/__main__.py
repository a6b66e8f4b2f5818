"""`python -m bench.control`: see `bench.control`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.network.table import RESULTS, Table

from . import page
from .cells import cells, slow_cell


def main(words: Sequence[str] | None = None, results: Path = RESULTS, written: Path = page.PAGE) -> int:
    """Measure the cells that are not done, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.control", description="The control plane of many ranks.")
    parser.add_argument("part", choices=("measure", "slow", "page"), help="see the page")
    part = parser.parse_args(words).part
    table = Table(results / "control.jsonl")
    for cell, measure in {"measure": cells(), "slow": [slow_cell()], "page": []}[part]:
        if cell not in table:
            print(cell, flush=True)
            table.add(cell, measure())
    print(f"The page is {page.write(table, written)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
