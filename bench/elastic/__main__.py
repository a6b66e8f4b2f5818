"""`python -m bench.elastic [run | page]`: see `bench.elastic`."""

import argparse
import sys
from collections.abc import Sequence

from bench.netlab import obstacle
from bench.network.table import RESULTS, Table

from . import page, torchft_peer
from .cells import cells
from .experiment import measure

PATH = RESULTS / "elastic.jsonl"


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is missing, draw and write the page; 1 if something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.elastic", description="Ranks killed and replaced.")
    parser.add_argument("what", nargs="?", choices=["run", "page"], default="page")
    parser.add_argument("--only", metavar="TEXT", default="", help="only cells whose algorithm and event contain this")
    options = parser.parse_args(words)
    table, failed = Table(PATH), 0
    if options.what == "run":
        if reason := obstacle():
            parser.exit(1, f"{reason}\n")
        for cell in cells():
            there = cell["algorithm"] != torchft_peer.NAME or torchft_peer.INSTALLED
            if there and cell not in table and options.only in f"{cell['algorithm']}, {cell['event']}":
                try:
                    table.add(cell, measure(cell))
                except (RuntimeError, TimeoutError) as error:
                    failed += 1
                    table.fail(cell, str(error))
                    print(f"failed: {cell}: {error}", file=sys.stderr)
    print(f"The page is {page.write(table)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
