"""`python -m bench.frontier [losses | steps | page]`: see `bench.frontier`."""

import argparse
import math
import sys
from collections.abc import Sequence

from bench.network import runs
from bench.network.table import Table

from . import page, picture, timing, trajectories
from .contenders import CONTENDERS, contender


def main(words: Sequence[str] | None = None) -> int:
    """Measure what is missing, draw and write the page; 1 if something could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.frontier", description="Seconds to the same loss.")
    parser.add_argument("what", nargs="?", choices=["losses", "steps", "page"], default="page")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="only these contenders")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no training after these (losses)")
    parser.add_argument("--networks", nargs="+", choices=list(timing.NETWORKS), default=list(timing.NETWORKS),
                        metavar="NETWORK", help="only these (steps)")  # fmt: skip
    options = parser.parse_args(words)
    try:
        some = [contender(name) for name in options.only] or [
            each for each in CONTENDERS if getattr(each, "installed", True)
        ]
    except ValueError as error:
        parser.error(str(error))
    failed = 0
    try:
        if options.what == "losses":
            failed = trajectories.run(some, options.minutes)
        elif options.what == "steps":
            table, before = Table(page.TIMINGS), -1
            cells = timing.cells(some, Table(trajectories.PATH))
            while before < len(table):  # results of trials decide what comes next
                before = len(table)
                due = [each for each in cells + timing.free_cells(some, table) if is_on(each, options.networks)]
                failed = runs.measure(due, table, "bench.frontier.timing")
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    for path in picture.draw(Table(trajectories.PATH), Table(page.TIMINGS)):
        print(f"The picture is {path}")
    print(f"The page is {page.write()}; what plans show is in {page.write_for_plans()}")
    return 1 if failed else 0


def is_on(cell: runs.Cell, networks: Sequence[str]) -> bool:
    """Return whether a cell is of one of some networks."""
    names = {name for facts in timing.NETWORKS.values() for name in facts}
    return {k: v for k, v in cell.items() if k in names} in [timing.NETWORKS[each] for each in networks]


if __name__ == "__main__":
    sys.exit(main())
