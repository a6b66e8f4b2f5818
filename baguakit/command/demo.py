"""The subcommand `demo`: ranks that see different digits train with one algorithm after another."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .. import algorithms
from ..arguments import integer
from ..pictures import blank, line_style, set_frame
from ..rules import hierarchical
from ..topology import Exponential, OnePeerExact
from .digits import DIGITS, Contender, Result, has_nodes, prepare, train
from .pacing import bits_per_second, check_rates, written
from .ranks import crew, leads
from .screen import Refusal, Table, say

STEPS, RANKS, RATE = 150, 4, "100mbit"
MOST = 6  # curves of the picture

DESCRIPTION = """\
Train a small network on printed digits with one algorithm after another. Each
rank sees only some of the digits, so that it cannot learn the others alone. The
table shows the accuracy, the bytes sent, and the time of a step.

With --rate every rank may send only so much a second, as over a slow network:
the times are then measured at that rate. It needs no root. Without --rate the
ranks train over loopback, and the times of a network are computed.

Under torchrun the demo uses the ranks of torchrun, else it starts some itself.
"""

ALONE = Contender("no communication", algorithms.local_sgd(every=10**9), reaches=0)
BASE = Contender("gradient_allreduce", algorithms.gradient_allreduce(), reaches=0.97, telling=True)
CONTENDERS: tuple[Contender, ...] = (
    ALONE,
    BASE,
    Contender("bytegrad", algorithms.bytegrad(), telling=True),
    Contender("bytegrad, error feedback", algorithms.bytegrad(error_feedback=True)),
    Contender("bytegrad, hierarchical", hierarchical(algorithms.bytegrad()), needs_nodes=True),
    Contender("power_sgd", algorithms.power_sgd(rank=4), telling=True),
    Contender("top_k", algorithms.top_k(ratio=0.01)),
    Contender("qadam", algorithms.qadam(warmup_steps=40), lr=0.002, momentum=0),
    Contender("decoupled_momentum", algorithms.decoupled_momentum(), lr=0.005, momentum=0),
    Contender("signum", algorithms.signum(), lr=0.01, momentum=0),
    Contender("lion_vote", algorithms.lion_vote(), lr=0.01, momentum=0),
    Contender("decentralized, AWC", algorithms.decentralized(order="awc")),
    Contender("decentralized, ATC", algorithms.decentralized(order="atc")),
    Contender("choco", algorithms.choco()),
    Contender("choco, one peer", algorithms.choco(OnePeerExact(), gamma=1.0), telling=True),
    Contender("quasi_global_momentum", algorithms.quasi_global_momentum(), momentum=0),
    Contender("push_sum", algorithms.push_sum(Exponential())),
    Contender("local_sgd", algorithms.local_sgd(every=8), telling=True),
    Contender("diloco", algorithms.diloco(every=10), telling=True),
)
OTHERS = set(algorithms.__all__) - {"async_model_average", *(each.family for each in CONTENDERS)}
CONTENDERS += tuple(Contender(name, getattr(algorithms, name)()) for name in sorted(OTHERS))
BY_NAME = {each.name: each for each in CONTENDERS}


def chosen(name: str | None, every: bool, ranks: int) -> Sequence[Contender]:
    """Return the contenders to run: the default ones, all of them if `every`, or the first two and the named one."""
    able = [each for each in CONTENDERS if has_nodes(ranks) or not each.needs_nodes]
    if name is None:
        return [each for each in able if every or each.telling or each is ALONE]
    if name not in {known for each in able for known in (each.name, each.family)}:
        names = ", ".join(dict.fromkeys(each.family for each in able if each is not ALONE))
        raise Refusal(f"there is no algorithm called {name!r} for {ranks} ranks; choose one of: {names}")
    return [each for each in able if each in (ALONE, BASE) or name in (each.name, each.family)]


def over(result: Result, bits: float) -> Result:
    """Return `result` with the times that a network of `bits` per second would give, if nothing overlaps."""
    curve = tuple((sent, seconds + sent * 8 / bits, loss) for sent, seconds, loss in result.curve)
    return replace(result, seconds=result.seconds + result.sent * 8 / bits, curve=curve)


def columns(rate: str, how: str) -> dict[str, str]:
    """Return the columns of the table: 80 characters."""
    measures = {"accuracy": ">8", "sent\na step": ">10", "of\nall-reduce": ">10"}
    return {"algorithm": "<27"} | measures | {f"a step at\n{rate}\n{how}": ">9", "faster": ">6"}


def row(result: Result, base: Result | None) -> list[str]:
    """Return the cells of a result, compared with `base`, the result of an all-reduce."""
    share, speed = "", ""
    if base is not None:
        share, speed = f"{result.sent / base.sent:.3f}", f"{base.seconds / result.seconds:.1f} ×"
    sent, step = f"{result.sent / 1000:,.1f} kB", f"{result.seconds * 1e3:,.1f} ms"
    return [result.contender, f"{result.accuracy:.1%}", sent, share, step, speed]


MEASURED = "A step at {rate} is measured, with every rank kept below {rate}."
COMPUTED = """\
A step at {rate} is computed, not measured: the measured step over loopback, and \
after it the measured bytes at that rate. Nothing overlaps, so it is rather \
long; --rate measures it. Over loopback alone, where bytes cost next to nothing, \
an all-reduce always looks best."""
LEGEND = """
accuracy     on test images, of the mean of the ranks' networks; without
             communication, the mean over the ranks of their own accuracies
sent         by a rank; "of all-reduce" is the ratio to gradient_allreduce
faster       than gradient_allreduce"""


def draw(results: Sequence[Result], rate: str, how: str, ranks: int, path: Path) -> None:
    """Draw the curves of the most informative results, and save the picture."""
    telling = sorted(results, key=lambda result: not BY_NAME[result.contender].telling)
    figure = blank(8, 4.2)
    axes = figure.subplots()
    for i, each in enumerate([each for each in telling if each.sent][:MOST]):
        _, times, losses = zip(*each.curve, strict=True)
        axes.plot(times, losses, label=each.contender, **line_style(i))
    axes.set(xscale="log", yscale="log", ylabel="test loss of the mean of the networks")
    axes.set_xlabel(f"seconds of training at {rate}, {how}" + " from measured bytes" * (how == "computed"))
    axes.set_title(f"Printed digits on {ranks} ranks, rank r sees those with d mod {ranks} = r", fontsize="medium")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    set_frame(axes, "right center", fontsize=9)
    figure.savefig(path, dpi=150)


def broken_claims(results: Sequence[Result], ranks: int, complete: bool) -> list[str]:
    """Return the claims of the demo that the results contradict, as sentences.

    `complete` is whether the run has the ranks, steps and seed that the claims are made for.
    """
    found, broken = {result.contender: result for result in results}, []
    most = (-(-10 // ranks) + 1) / 10  # a rank has at most ⌈10 / n⌉ of ten digits; 1 / 10 is added for luck
    if (alone := found[ALONE.name].alone) > most:
        broken.append(
            f"without communication {alone:.1%} of the images were read, more than {most:.0%}: the task shows nothing "
            "about communication"
        )
    for name, result in found.items() if complete else ():
        if result.merged < (least := BY_NAME[name].reaches):
            broken.append(f"{name} reads {result.merged:.1%} of the images and should read {least:.0%}")
        if name == "bytegrad" and (ratio := result.sent / found[BASE.name].sent) > 0.27:
            broken.append(f"bytegrad sends {ratio:.1%} of the bytes of gradient_allreduce, more than 27%")
    return broken


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
    """Train with each algorithm, and print the results; return 1 if they contradict a claim."""
    bits = check(options)
    chosen(options.algorithm, options.all, options.ranks)
    with crew(options.ranks) as (size, everywhere):
        if not 2 <= size <= DIGITS:
            raise Refusal(f"the demo needs 2 to 10 ranks, as each holds some of ten digits, and there are {size}")
        contenders = chosen(options.algorithm, options.all, size)
        place, rates = everywhere(prepare, None if options.rate is None else bits / 8)[0]
        say(f"{size} ranks, {place}; {options.steps} steps with each algorithm")
        if rates is not None:
            say(check_rates(bits, *rates))
        say()
        rate, how = written(bits), "computed" if rates is None else "measured"
        results: list[Result] = []
        table = Table(columns(rate, how))
        for contender in contenders:
            result = everywhere(train, contender, options.steps, options.seed)[0]
            results.append(over(result, bits) if rates is None else result)
            table.row(*row(results[-1], results[1] if len(results) > 1 else None))  # the second is BASE
        say(f"{LEGEND}\n\n{(COMPUTED if rates is None else MEASURED).format(rate=rate)}")
        for result in results:
            if result.between_nodes:
                say(f"{result.contender}: {result.between_nodes / 1000:,.1f} kB of a step go from node to node.")
        if not leads():
            return 0
        if options.out is not None:
            draw(results, rate, how, size, options.out)
            say(f"\nThe picture is {options.out.resolve()}")
        broken = broken_claims(results, size, (options.steps, options.seed, size) == (STEPS, 0, RANKS))
        for sentence in broken:
            print(f"baguakit demo: {sentence}", file=sys.stderr, flush=True)
        return int(bool(broken))


def check(options: argparse.Namespace) -> int:
    """Return the rate in bits per second; raise a Refusal if an option is impossible."""
    if options.out is not None:
        if options.out.suffix != ".png" or not options.out.parent.is_dir():
            raise Refusal(f"--out is a .png file in a folder that exists, not {options.out}")
        if importlib.util.find_spec("matplotlib") is None:
            raise Refusal("--out needs matplotlib: pip install matplotlib")
    if options.rate is not None and sys.platform != "linux":
        raise Refusal("--rate needs Linux, whose sockets can be slowed down; leave it out")
    try:
        integer("--ranks", options.ranks, 2, DIGITS)
        integer("--steps", options.steps, 1)
        integer("--seed", options.seed, 0)
        return bits_per_second(RATE if options.rate is None else options.rate)
    except ValueError as error:
        raise Refusal(str(error)) from None
