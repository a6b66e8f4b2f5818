"""The subcommand `demo`: ranks that see different digits train with one algorithm after another.

Rank r of n sees printed digits d with d mod n = r, with noise added.
"""

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from .. import algorithms
from ..arguments import integer
from ..attach import attach
from ..comm import Comm
from ..pictures import blank, line_style, set_frame
from ..primitives import mean_
from ..rules import Algorithm, hierarchical
from ..topology import Exponential, OnePeerExact
from .pacing import Pacer, bits_per_second, check_rates, measured, written
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

TRAINED, TESTED, BATCH = 4000, 1000, 32  # images; BATCH is the number in a step on each rank
SIDE, NOISE = 8, 0.22  # pixels, and the standard deviation of their noise
DIGITS = 10
POINTS = 20  # of a curve
FONT = """
.###. ..#.. .###. ##### ...#. ##### ..##. ##### .###. .###.
#...# .##.. #...# ...#. ..##. #.... .#... ....# #...# #...#
#..## ..#.. ....# ..#.. .#.#. ####. #.... ...#. #...# #...#
#.#.# ..#.. ...#. ...#. #..#. ....# ####. ..#.. .###. .####
##..# ..#.. ..#.. ....# ##### ....# #...# .#... #...# ....#
#...# ..#.. .#... #...# ...#. #...# #...# .#... #...# ...#.
.###. .###. ##### .###. ...#. .###. .###. .#... .###. .##..
"""


@dataclass(frozen=True)
class Contender:
    """An algorithm, with the hyperparameters that the demo trains with."""

    name: str  # the name of a function in `bk.algorithms`, and after a comma the variant
    algorithm: Algorithm
    lr: float = 0.05  # at the beginning; it falls to zero linearly
    momentum: float = 0.9  # of the optimizer; 0 where the algorithm has its own
    reaches: float = 0.9  # the test accuracy that it must reach
    needs_nodes: bool = False  # whether its ranks are divided into nodes of two
    telling: bool = False  # whether it is run by default and drawn

    @property
    def family(self) -> str:
        """Return the name without the variant."""
        return self.name.split(",")[0]


@dataclass(frozen=True)
class Result:
    """The results of a training; `contender` is the name of its `Contender`."""

    contender: str
    alone: float  # the test accuracy of a rank's own network, the mean over ranks
    merged: float  # the test accuracy of the mean of the networks
    sent: float  # bytes that this rank sent in a step
    between_nodes: float  # bytes of `sent` that left its node
    seconds: float  # of a step, the mean
    curve: tuple[tuple[float, float, float], ...]  # (bytes sent, seconds spent, loss of the mean of the networks)


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
    """Return the contenders to run: all, if `every`; if `name`, two baselines and its variants; else the default."""
    able = [each for each in CONTENDERS if has_nodes(ranks) or not each.needs_nodes]
    if name is None:
        return [each for each in able if every or each.telling or each is ALONE]
    if name not in {known for each in able for known in (each.name, each.family)}:
        names = ", ".join(dict.fromkeys(each.family for each in able if each is not ALONE))
        raise Refusal(f"there is no algorithm called {name!r} for {ranks} ranks; choose one of: {names}")
    return [each for each in able if each in (ALONE, BASE) or name in (each.name, each.family)]


def over(result: Result, bits: float) -> Result:
    """Return `result` with the times that it would have over a network of `bits` bits per second, without overlap."""
    curve = tuple((sent, seconds + sent * 8 / bits, loss) for sent, seconds, loss in result.curve)
    return replace(result, seconds=result.seconds + result.sent * 8 / bits, curve=curve)


def columns(rate: str, how: str) -> dict[str, str]:
    """Return {head: format} of the columns of the table, which is 80 characters wide."""
    measures = {"accuracy": ">8", "sent\na step": ">10", "of\nall-reduce": ">10"}
    return {"algorithm": "<27"} | measures | {f"a step at\n{rate}\n{how}": ">9", "faster": ">6"}


def row(result: Result, base: Result | None) -> list[str]:
    """Return the table cells of a result, compared with `base`, the result of an all-reduce; None: not compared."""
    share, speed = "", ""
    if base is not None:
        share, speed = f"{result.sent / base.sent:.3f}", f"{base.seconds / result.seconds:.1f} ×"
    sent, step = f"{result.sent / 1000:,.1f} kB", f"{result.seconds * 1e3:,.1f} ms"
    accuracy = result.merged if result.sent else result.alone  # as the average itself would be communication
    return [result.contender, f"{accuracy:.1%}", sent, share, step, speed]


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
    """Draw the loss of the first six results that communicate, the default contenders first; save the picture."""
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

    Without `complete`, check only that ranks cannot learn alone: the other claims hold for the default options only.
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
    """Add the options of `demo` to its parser."""
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
    """Train with each algorithm, and print the results. Return 1 if they contradict a claim of the demo, else 0."""
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


# The task: the images, the network, and the training on one rank


def drawn(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return `count` images (count, 64) and their digits, at random places, with random brightness, and with noise."""
    random, images = torch.Generator().manual_seed(seed), torch.zeros(count, SIDE, SIDE, dtype=torch.float32)
    glyphs = [FONT.split()[digit::DIGITS] for digit in range(DIGITS)]
    shapes = torch.tensor([[[mark == "#" for mark in row] for row in glyph] for glyph in glyphs]).float()
    height, width = shapes.shape[1:]
    labels = torch.randint(DIGITS, (count,), generator=random)
    tops = torch.randint(SIDE - height + 1, (count, 1, 1), generator=random)
    lefts = torch.randint(1, SIDE - width, (count, 1, 1), generator=random)
    rows, columns = tops + torch.arange(height)[:, None], lefts + torch.arange(width)
    images[torch.arange(count)[:, None, None], rows, columns] = shapes[labels]
    images *= 0.5 + torch.rand(count, 1, 1, dtype=torch.float32, generator=random)
    images += NOISE * torch.randn(images.shape, dtype=torch.float32, generator=random)
    return images.flatten(1).sub_(0.35).mul_(2), labels


class Digits:
    """The training data of one rank, and the test data of all ranks, as (images, labels). Every run uses equal data."""

    def __init__(self, rank: int, ranks: int, device: torch.device | None = None) -> None:
        images, labels = drawn(TRAINED, seed=0)
        mine = labels % ranks == rank
        self.rank, self.train = rank, (images[mine].to(device), labels[mine].to(device))
        self.test = tuple(each.to(device) for each in drawn(TESTED, seed=1))

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield random batches of the training data of this rank, without end."""
        images, labels = self.train
        random = torch.Generator().manual_seed(1000 * seed + self.rank)
        while True:
            chosen = torch.randint(len(labels), (BATCH,), generator=random).to(labels.device)
            yield images[chosen], labels[chosen]


def network(seed: int, width: int = 512) -> nn.Sequential:
    """Return a network that is quick to compute and slow to send. With 512 as `width`, it has 301,066 parameters."""
    torch.manual_seed(seed)
    first, last = nn.Linear(SIDE * SIDE, width), nn.Linear(width, DIGITS)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)


@torch.no_grad()
def evaluate(model: nn.Module, digits: Digits) -> tuple[float, Tensor]:
    """Return the test loss and the test accuracy of a network."""
    images, labels = digits.test
    read = model(images)
    return float(cross_entropy(read, labels)), (read.argmax(1) == labels).float().mean()


def prepare(kept: dict[str, Any], rate: float | None) -> tuple[str, tuple[float, float] | None]:
    """Put a communicator and the data into `kept`; limit this rank to `rate` bytes per second from now on. Collective.

    Return where the ranks train, in words, and the measured rates (see `measured`; None without `rate`).
    """
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    torch.set_num_threads(1)  # ranks share the cores
    comm = Comm()
    if has_nodes(comm.size):
        comm = Comm(mesh=init_device_mesh(device.type, (comm.size // 2, 2), mesh_dim_names=("inter", "intra")))
    kept.update(comm=comm, digits=Digits(comm.rank, comm.size, device))
    place = "on the CPU, over gloo" if device.type == "cpu" else "a GPU each, over NCCL"
    if rate is None:
        return place, None
    kept["pacer"] = Pacer(rate)
    return place, measured(comm, rate)


def train(kept: dict[str, Any], contender: Contender, steps: int, seed: int) -> Result:
    """Train a new network, with the weights and batches that `seed` gives; return the result. Collective.

    The time of copying the network for `Result.curve` is not counted.
    """
    comm, digits = kept["comm"], kept["digits"]
    model = network(seed).to(digits.train[0].device)
    optimizer = torch.optim.SGD(model.parameters(), lr=contender.lr, momentum=contender.momentum)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    moments = {round(steps ** (i / POINTS)) for i in range(POINTS + 1)}  # evenly spaced on a logarithmic axis
    batches, spent, snapshots = digits.batches(seed), 0.0, []
    attachment = attach(model, optimizer, contender.algorithm, comm=comm)
    comm.gather_objects(None)  # from here on all ranks train
    for step in range(1, steps + 1):
        began = time.perf_counter()
        images, labels = next(batches)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        schedule.step()
        spent += time.perf_counter() - began
        if step in moments:  # evaluated after training: an average now would make fast ranks wait
            snapshots.append((attachment.report().bytes_sent, spent, copy.deepcopy(model)))
    report = attachment.report()
    seconds = max(comm.gather_objects(spent)) / steps
    alone = float(mean_(evaluate(model, digits)[1], comm))
    attachment.merge()
    attachment.detach()
    curve = []
    for sent, passed, then in snapshots:
        mean_([p.data for p in then.parameters()], comm)
        curve.append((sent, passed, evaluate(then, digits)[0]))
    between_nodes = sum(row.bytes.get("inter", 0) for row in report.rows) / steps
    merged = float(evaluate(model, digits)[1])
    return Result(contender.name, alone, merged, report.bytes_per_step, between_nodes, seconds, tuple(curve))


def has_nodes(ranks: int) -> bool:
    """Return whether the ranks can be divided into two or more nodes of two ranks."""
    return ranks >= 4 and ranks % 2 == 0
