"""The subcommand `demo`."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from ..pacing.pacer import check_rates
from ..pacing.rates import bits_per_second, bytes_per_second
from ..ranks import Crew, crew
from ..refusal import Refusal
from ..screen import Table, say
from .contenders import BASE, Contender, chosen
from .digits import DIGITS
from .outcome import LEGEND, Clock, broken_claims, columns, row
from .training import Result, advance, begin, finish, prepare

STEPS, RANKS, RATE = 150, 4, "100mbit"
CHUNK = 10  # steps between two movements of the progress bar

DESCRIPTION = """\
Train a small network on printed digits with one algorithm after another. Each
rank sees only some of the digits, so that it cannot learn the others alone. The
table shows the accuracy, the bytes sent, and the time of a step.

With --rate every rank may send only so much a second, as over a slow network:
the times are then measured at that rate. It needs no root. Without --rate the
ranks train over loopback, and the times of a network are computed.

Under torchrun the demo uses the ranks of torchrun, else it starts some itself.
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rate", metavar="RATE", help='train at this rate, such as "100mbit" or "1gbit"; Linux only')
    parser.add_argument("--ranks", type=int, default=RANKS, metavar="N", help="processes, 2 to 10 (%(default)s)")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="for each algorithm (%(default)s)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="run every algorithm; the default is the six that say most")
    which.add_argument("--algorithm", metavar="NAME", help="run this one, beside gradient_allreduce")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw the loss by time; needs matplotlib")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo; return 1 if the results contradict a claim."""
    check(options)
    with crew(options.ranks) as ranks:
        return compare(ranks, options)


def check(options: argparse.Namespace) -> None:
    """Raise a Refusal if an option is impossible."""
    if not 2 <= options.ranks <= DIGITS:
        raise Refusal(f"--ranks is 2 to 10, as each rank holds some of ten digits, not {options.ranks}")
    if options.steps < 1:
        raise Refusal(f"--steps is 1 or more, not {options.steps}")
    if options.seed < 0:
        raise Refusal(f"--seed is 0 or more, not {options.seed}")
    if options.out is not None:
        if options.out.suffix != ".png" or not options.out.parent.is_dir():
            raise Refusal(f"--out is a .png file in a folder that exists, not {options.out}")
        if importlib.util.find_spec("matplotlib") is None:
            raise Refusal("--out needs matplotlib: pip install matplotlib")
    try:
        bits_per_second(options.rate or RATE)
        chosen(options.algorithm, options.all, options.ranks)
    except ValueError as error:
        raise Refusal(str(error)) from None
    if options.rate and sys.platform != "linux":
        raise Refusal("--rate needs Linux, whose sockets can be slowed down; leave it out")


def compare(ranks: Crew, options: argparse.Namespace) -> int:
    """Train with each algorithm, and show what came of it."""
    if not 2 <= ranks.size <= DIGITS:
        raise Refusal(f"the demo needs 2 to 10 ranks, as each holds some of ten digits, and there are {ranks.size}")
    try:
        contenders = chosen(options.algorithm, options.all, ranks.size)
    except ValueError as error:
        raise Refusal(str(error)) from None
    speak = say if ranks.speaks else lambda *_, **__: None
    place, rates = ranks.run(prepare, bytes_per_second(options.rate) if options.rate else None)[0]
    speak(f"{ranks.size} ranks, {place}; {options.steps} steps with each algorithm")
    if rates is not None:
        speak(check_rates(options.rate, *rates))
    speak()
    clock = Clock(bits_per_second(options.rate or RATE), options.rate is not None)
    results = trained(ranks, contenders, options, clock)
    speak(LEGEND)
    speak(f"\n{clock.said}")
    for result in results:
        if result.between_nodes:
            speak(f"{result.contender}: {result.between_nodes / 1000:,.1f} kB of a step go from node to node.")
    usual = (options.steps, options.seed, ranks.size) == (STEPS, 0, RANKS)
    broken = broken_claims(results, ranks.size, complete=usual)
    if ranks.speaks and options.out is not None:
        from .picture import draw

        draw(results, clock, ranks.size, options.out)
        speak(f"\nThe picture is {options.out.resolve()}")
    for sentence in broken if ranks.speaks else ():
        print(f"baguakit demo: {sentence}", file=sys.stderr, flush=True)
    return 1 if broken and ranks.speaks else 0


def trained(ranks: Crew, contenders: Sequence[Contender], options: argparse.Namespace, clock: Clock) -> list[Result]:
    """Return the results, shown as rows of a table as they come."""
    results: list[Result] = []
    base: Result | None = None
    with Table(columns(clock), len(contenders) * options.steps, silent=not ranks.speaks) as table:
        for contender in contenders:
            results.append(train(ranks, contender, options, table))
            base = results[-1] if contender is BASE else base
            table.row(*row(results[-1], clock, base), style="bold" if contender is BASE else "")
    return results


def train(ranks: Crew, contender: Contender, options: argparse.Namespace, table: Table) -> Result:
    """Return the outcome of one contender: rank 0's."""
    table.step(contender.name, 0)
    ranks.run(begin, contender.name, options.steps, options.seed)
    left = options.steps
    while left:
        steps = min(left, CHUNK)
        ranks.run(advance, steps)
        table.step(contender.name, steps)
        left -= steps
    result: Result = ranks.run(finish)[0]
    return result
