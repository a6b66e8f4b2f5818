"""The subcommand `demo`: ranks that see different digits train with one algorithm after another.

Rank r of n sees printed digits d with d mod n = r, with noise added.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from ..comm import Comm
from ..compare import page
from ..compare.contenders import Contender, contender
from ..compare.pacing import Pacer, bits_per_second, check_rates, measured, written
from ..compare.tasks import Task, Training
from ..compare.training import train
from ..pictures import blank, set_frame
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


def family(name: str) -> str:
    """Return the name of an algorithm without its variant."""
    return name.split(",")[0]


ALONE, BASE, BY_NODE = "no communication", "gradient_allreduce", "bytegrad, hierarchical"
TELLING = (BASE, "bytegrad", "power_sgd", "choco, one peer", "local_sgd", "diloco")  # run by default and drawn
REACHES = {ALONE: 0.0, BASE: 0.97}  # the test accuracy, at the least; 0.9 for the others
LR = 0.05  # at the beginning; it falls to zero linearly
OPTIMIZERS = {
    "qadam": 0.002,
    "decoupled_momentum": 0.005,
    "signum": 0.01,
    "lion_vote": 0.01,
    "quasi_global_momentum": LR,
}
EXPRESSIONS = {
    ALONE: "local_sgd(every=10**9)",
    BASE: "gradient_allreduce()",
    "bytegrad": "bytegrad()",
    "bytegrad, error feedback": "bytegrad(error_feedback=True)",
    BY_NODE: "hierarchical(bytegrad())",
    "power_sgd": "power_sgd(rank=4)",
    "top_k": "top_k(ratio=0.01)",
    "qadam": "qadam(warmup_steps=40)",
    "decoupled_momentum": "decoupled_momentum()",
    "signum": "signum()",
    "lion_vote": "lion_vote()",
    "decentralized, AWC": 'decentralized(order="awc")',
    "decentralized, ATC": 'decentralized(order="atc")',
    "choco": "choco()",
    "choco, one peer": "choco(OnePeerExact(), gamma=1.0)",
    "quasi_global_momentum": "quasi_global_momentum()",
    "push_sum": "push_sum(Exponential())",
    "local_sgd": "local_sgd(every=8)",
    "diloco": "diloco(every=10)",
}
OTHERS = set(algorithms.__all__) - {"async_model_average", *(family(name) for name in EXPRESSIONS)}
CONTENDERS = tuple(
    Contender(name, expression, "sgd" if name in OPTIMIZERS else "momentum", OPTIMIZERS.get(name, LR))
    for name, expression in [*EXPRESSIONS.items(), *((name, f"{name}()") for name in sorted(OTHERS))]
)


def chosen(name: str | None, every: bool, ranks: int) -> Sequence[Contender]:
    """Return the contenders to run: all, if `every`; if `name`, two baselines and its variants; else the default."""
    able = [each for each in CONTENDERS if has_nodes(ranks) or each.name != BY_NODE]
    if name is None:
        return [each for each in able if every or each.name in (ALONE, *TELLING)]
    found = [each for each in able if name in (each.name, family(each.name))]
    try:
        found = found or [replace(contender(name), name=name, optimizer="momentum", lr=LR)]
    except ValueError as error:
        raise Refusal(str(error)) from None
    return list(dict.fromkeys([*CONTENDERS[:2], *found]))


def over(result: Mapping[str, Any], bits: float) -> dict[str, Any]:
    """Return `result` with the times that it would have over a network of `bits` bits per second, without overlap."""
    course = [(sent, spent + sent * 8 / bits) for sent, spent in result["course"]]
    return {**result, "step": result["step"] + result["bytes"] * 8 / bits, "course": course}


def columns(rate: str, how: str) -> dict[str, str]:
    """Return {head: format} of the columns of the table, which is 80 characters wide."""
    measures = {"accuracy": ">8", "sent\na step": ">10", "of\nall-reduce": ">10"}
    return {"algorithm": "<27"} | measures | {f"a step at\n{rate}\n{how}": ">9", "faster": ">6"}


def row(name: str, result: Mapping[str, Any], base: Mapping[str, Any] | None) -> list[str]:
    """Return the table cells of a result, compared with `base`, the result of an all-reduce; None: not compared."""
    share, speed = "", ""
    if base is not None:
        share, speed = f"{result['bytes'] / base['bytes']:.3f}", f"{base['step'] / result['step']:.1f} ×"
    sent, step = f"{result['bytes'] / 1000:,.1f} kB", f"{result['step'] * 1e3:,.1f} ms"
    return [name, f"{accuracy(result):.1%}", sent, share, step, speed]


def accuracy(result: Mapping[str, Any]) -> float:
    """Return the accuracy of the mean of the networks; without communication, the mean over the ranks of their own."""
    return float((result["scores"] if result["bytes"] else result["alone"])["accuracy"])


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


def draw(results: Mapping[str, Any], rate: str, how: str, ranks: int, path: Path) -> None:
    """Draw the loss of the first six results that communicate, the default contenders first; save the picture."""
    names = sorted((name for name in results if results[name]["bytes"]), key=lambda name: name not in TELLING)[:MOST]
    figure = blank(8, 4.2)
    axes = figure.subplots()
    both = {name: zip(results[name]["course"], results[name]["losses"], strict=True) for name in names}
    page.panel(axes, {name: [(spent, loss) for (_, spent), (_, loss) in both[name]] for name in names})
    axes.set(yscale="log", ylabel="test loss of the mean of the networks")
    axes.set_xlabel(f"seconds of training at {rate}, {how}" + " from measured bytes" * (how == "computed"))
    axes.set_title(f"Printed digits on {ranks} ranks, rank r sees those with d mod {ranks} = r", fontsize="medium")
    axes.yaxis.set_major_formatter("{x:g}")
    set_frame(axes, "right center", fontsize=9)
    figure.savefig(path, dpi=150)


def broken_claims(results: Mapping[str, Any], ranks: int, complete: bool) -> list[str]:
    """Return the claims of the demo that the results, by contender, contradict, as sentences.

    Without `complete`, check only that ranks cannot learn alone: the other claims hold for the default options only.
    """
    broken = []
    most = (-(-10 // ranks) + 1) / 10  # a rank has at most ⌈10 / n⌉ of ten digits; 1 / 10 is added for luck
    if (alone := results[ALONE]["alone"]["accuracy"]) > most:
        broken.append(
            f"without communication {alone:.1%} of the images were read, more than {most:.0%}: the task shows nothing "
            "about communication"
        )
    for name, result in results.items() if complete else ():
        least = REACHES.get(name, 0.9 if name in EXPRESSIONS else 0.0)
        if (read := result["scores"]["accuracy"]) < least:
            broken.append(f"{name} reads {read:.1%} of the images and should read {least:.0%}")
        if name == "bytegrad" and (ratio := result["bytes"] / results[BASE]["bytes"]) > 0.27:
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
    which.add_argument("--algorithm", metavar="NAME", help="run this one, or MODULE:NAME, beside gradient_allreduce")
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
        results: dict[str, Any] = {}
        table = Table(columns(rate, how))
        for each in contenders:
            result = everywhere(trained, each, options.steps, options.seed)[0]
            results[each.name] = over(result, bits) if rates is None else result
            table.row(*row(each.name, results[each.name], results.get(BASE)))
        say(f"{LEGEND}\n\n{(COMPUTED if rates is None else MEASURED).format(rate=rate)}")
        for name, result in results.items():
            if result["between"]:
                say(f"{name}: {result['between'] / 1000:,.1f} kB of a step go from node to node.")
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


@dataclass(frozen=True)
class Reading(Task):
    """Reading digits, of which each rank sees some only."""

    def begin(self, seed: int, rank: int, ranks: int) -> Training:
        """Return the training of this rank, on its GPU if the ranks have NCCL."""
        digits = Digits(rank, ranks, device_of_rank())
        batches = digits.batches(seed)

        def loss(model: nn.Module, step: int) -> Tensor:
            images, labels = next(batches)
            return cross_entropy(model(images), labels)

        def validate(model: nn.Module) -> dict[str, float]:
            lost, right = evaluate(model, digits)
            return {"loss": lost, "accuracy": float(right)}

        return Training(network(seed).to(device_of_rank()), loss, validate)

    def rate(self, lr: float, step: int, steps: int) -> float:
        """Return the learning rate of a step."""
        return lr * (1 - (step - 1) / steps)

    def validates(self, step: int, steps: int) -> bool:
        """Return whether a step is one of about twenty, evenly spaced on a logarithmic axis."""
        return step in {round(steps ** (i / POINTS)) for i in range(POINTS + 1)}


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


def device_of_rank() -> torch.device:
    """Return the GPU of this rank if the default group is NCCL's, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def prepare(kept: dict[str, Any], rate: float | None) -> tuple[str, tuple[float, float] | None]:
    """Put a communicator into `kept`; limit this rank to `rate` bytes per second from now on. Collective.

    Return where the ranks train, in words, and the measured rates (see `measured`; None without `rate`).
    """
    device = device_of_rank()
    torch.set_num_threads(1)  # ranks share the cores
    comm = Comm()
    if has_nodes(comm.size):
        comm = Comm(mesh=init_device_mesh(device.type, (comm.size // 2, 2), mesh_dim_names=("inter", "intra")))
    kept["comm"] = comm
    place = "on the CPU, over gloo" if device.type == "cpu" else "a GPU each, over NCCL"
    if rate is None:
        return place, None
    kept["pacer"] = Pacer(rate)
    return place, measured(comm, rate)


def trained(kept: dict[str, Any], each: Contender, steps: int, seed: int) -> dict[str, Any]:
    """Train a new network, with the weights and batches that `seed` gives; return the result. Collective."""
    return train(each, Reading(), seed, each.lr or LR, steps, kept["comm"])


def has_nodes(ranks: int) -> bool:
    """Return whether the ranks can be divided into two or more nodes of two ranks."""
    return ranks >= 4 and ranks % 2 == 0
