"""`python -m bench.scaling`: see `bench.scaling`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from bench.network.table import RESULTS

from . import page
from .figures import draw_bagua, draw_bluefog, draw_outlook
from .inputs import measured
from .published import report


def main(words: Sequence[str] | None = None) -> int:
    """Print the comparison, draw three figures, and write the page where nothing else was asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.scaling", description="An α–β model of training.")
    parser.add_argument(
        "--measured", type=Path, nargs="+", default=[], metavar="FILE", help="what bk.tune.probe found, or numbers"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="(%(default)s)")
    options = parser.parse_args(words)
    try:
        cluster, training = measured(options.measured)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(report())
    options.out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Callable[[Figure], None]] = {
        "scaling-vgg16": draw_bagua,
        "scaling-resnet50": draw_bluefog,
        "scaling-outlook": lambda figure: draw_outlook(figure, cluster, training, bool(options.measured)),
    }
    for name, paint in figures.items():
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        paint(figure)
        figure.savefig(options.out / f"{name}.png", dpi=150)
        print(f"The picture is {options.out / name}.png")
    if options.out == RESULTS and not options.measured:
        print(f"The page is {page.write(RESULTS)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
