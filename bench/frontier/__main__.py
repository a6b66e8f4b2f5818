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
            cells = timing.cells(some, Table(trajectories.PATH))
            failed = runs.measure(cells, Table(page.TIMINGS), "bench.frontier.timing")
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    for path in picture.draw(Table(trajectories.PATH), Table(page.TIMINGS)):
        print(f"The picture is {path}")
    print(f"The page is {page.write()}; what plans show is in {page.write_for_plans()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
