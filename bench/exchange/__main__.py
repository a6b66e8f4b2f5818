"""`python -m bench.exchange`: see `bench.exchange`."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from . import counting, page


def main(words: Sequence[str] | None = None) -> int:
    """Count what was asked for, and write the page."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.exchange", description="Exchanges in one kernel, counted and predicted."
    )
    parser.add_argument(
        "what", choices=("count", "page"), help="execute the kernels and write the page, or the page alone"
    )
    parser.add_argument("--counts", type=Path, default=page.COUNTS, metavar="FILE", help="(%(default)s)")
    asked = parser.parse_args(words)
    if asked.what == "count":
        rows = []
        for name in counting.CODECS:
            for ranks in counting.RANKS:
                for one_hop in (False, True):
                    rows.append(counting.count(name, ranks, one_hop))
                    print(json.dumps(rows[-1]), flush=True)
        rows.append({"flights": counting.flights()})
        asked.counts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(f"The page is {page.write(asked.counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
