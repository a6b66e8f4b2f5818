"""`python -m bench.accuracy`: see `bench.accuracy`."""

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.network.table import RESULTS, machine

from . import page
from .formats import formats
from .measures import DRAWN, DRAWS, of_source
from .sources import SEED, distributions, gradients
from .training import asked, ways
from .training.tasks import text


def main(words: Sequence[str] | None = None) -> int:
    """Measure what was asked for, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.accuracy", description="The accuracy of wire formats.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--training", action="store_true", help="train with gradients of two to eight bits, or of an error"
    )
    which.add_argument("--page", action="store_true", help="measure nothing; write the page from the results")
    options = parser.parse_args(words)
    if options.training:
        ways.run()
        asked.run()
    elif not options.page:
        measure(RESULTS / f"{page.NAME}.json")
    print(f"The page is {page.write(RESULTS)}")
    return 0


def measure(path: Path) -> None:
    """Measure every format on every source, and write what was found as JSON."""
    torch.set_num_threads(1)
    every, sources = formats(), []
    for source in itertools.chain(distributions(), gradients()):
        print(source.name, flush=True)
        sources.append(of_source(source, every))
    about = {"kind": "accuracy", "machine": machine(), "seed": SEED, "draws": DRAWS, "drawn": DRAWN, "text": text(1)[2]}
    listed = [{"name": each.name, "bits": each.bits, "ours": each.compressor is not None} for each in every]
    found = about | {"formats": listed, "sources": sources}
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
