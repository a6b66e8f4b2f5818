"""`python -m bench.network [WHAT] [--quick]`: see `bench.network`."""

import argparse
import sys
from pathlib import Path

from . import backend, collectives, exchanges, few, figures, flows, page, plan, reports, runs, staged, steps, versions
from .contenders import contender
from .table import RESULTS, Table

WHAT = ("steps", "exchanges", "collectives", "few", "flows", "backend", "staged", "versions", "plan", "figures")


def main(words: list[str] | None = None) -> int:
    """Measure what is missing, print the table and draw; 1 if a cell could not be measured."""
    parser = argparse.ArgumentParser(prog="python -m bench.network", description="Algorithms on slow networks.")
    parser.add_argument("what", nargs="?", default="steps", choices=WHAT)
    parser.add_argument("--quick", action="store_true", help="a subset, in minutes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these contenders (steps)")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FOLDER", help="(%(default)s)")
    options = parser.parse_args(words)
    try:
        for name in options.only or ():
            contender(name)
    except ValueError as error:
        parser.error(str(error))
    trained = Table(options.out / "network-steps.jsonl")
    exchanged = Table(options.out / "network-exchanges.jsonl")
    collected = Table(options.out / "network-collectives.jsonl")
    probed = Table(options.out / "network-probes.jsonl")
    failed = 0
    try:
        if options.what == "steps":
            failed = runs.measure(steps.cells(options.quick, options.only), trained, "bench.network.train")
            print(reports.of_steps(trained))
        elif options.what == "exchanges":
            failed = runs.measure(exchanges.cells(options.quick), exchanged, "bench.network.exchanges")
            print(reports.of_exchanges(exchanged))
        elif options.what == "collectives":
            failed = runs.measure(collectives.cells(options.quick), collected, "bench.network.collectives")
            print(reports.of_exchanges(collected))
        elif options.what == "few":
            latencies = Table(options.out / "network-few.jsonl")
            failed = runs.measure(few.cells(options.quick), latencies, "bench.network.few")
            print(reports.of_few(latencies))
        elif options.what == "backend":
            programs = Table(options.out / "network-backend.jsonl")
            failed = runs.measure(backend.cells(options.quick), programs, "bench.network.backend")
            print(reports.of_backend(programs))
        elif options.what == "staged":
            through_host = Table(options.out / "network-staged.jsonl")
            failed = runs.measure(staged.cells(options.quick), through_host, "bench.network.staged")
            print(reports.of_staged(through_host))
            return done(failed, options.out)
        elif options.what == "versions":
            changed = Table(options.out / "network-versions.jsonl")
            failed = runs.measure(versions.cells(options.quick), changed, "bench.network.versions")
            print(reports.of_versions(changed))
            return done(failed, options.out)
        elif options.what == "flows":
            divided = Table(options.out / "network-flows.jsonl")
            failed = runs.measure(flows.cells(options.quick), divided, "bench.network.flows")
            print(reports.of_flows(divided))
            return 1 if failed else 0
        elif options.what == "plan":
            failed = runs.measure(plan.cells(options.quick), probed, "bench.network.plan")
            rows = plan.compared(trained, probed)
            plan.save(rows, options.out / "network-plan.json")
            print(plan.report(rows))
            return 1 if failed or not rows else 0
    except KeyboardInterrupt:
        print("\nInterrupted; the same command goes on from here.", file=sys.stderr)
        return 130
    for picture in figures.draw(trained, exchanged, collected, options.out):
        print(f"The picture is {picture}")
    return done(failed, options.out)


def done(failed: int, out: Path) -> int:
    """Write the page, if the results are its own; return 1 if a cell could not be measured."""
    if out == RESULTS:
        print(f"The page is {page.write(RESULTS)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
