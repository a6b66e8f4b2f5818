"""`python -m bench.scaling`: see `bench.scaling`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from baguakit.tune import Network
from bench.network.table import RESULTS

from . import check, page
from .figures import draw_bagua, draw_bluefog, draw_outlook
from .published import report


def main(words: Sequence[str] | None = None) -> int:
    """Print the comparison, draw three figures, and write the page where nothing else was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description="The planner beyond one machine.")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="what bk.tune.probe found on a cluster")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="(%(default)s)")
    options = parser.parse_args(words)
    try:
        measured = Network.from_json(options.measured.read_text()) if options.measured else None
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(report(), check.report(), sep="\n\n")
    options.out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Callable[[Figure], None]] = {
        "scaling-vgg16": draw_bagua,
        "scaling-resnet50": draw_bluefog,
        "scaling-outlook": lambda figure: draw_outlook(figure, measured),
    }
    for name, paint in figures.items():
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        paint(figure)
        figure.savefig(options.out / f"{name}.png", dpi=150)
        print(f"The picture is {options.out / name}.png")
    if options.out == RESULTS and measured is None:
        print(f"The page is {page.write(RESULTS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
