"""Handwritten digits, of which no rank can learn to read all alone: rank r of n holds only those with d mod n = r.

    torchrun --standalone --nproc_per_node=4 examples/digits.py                        # one algorithm after another
    torchrun --standalone --nproc_per_node=4 examples/digits.py --algorithm bytegrad   # one of them

Trains a small convolutional network on the digits that scikit-learn ships, once without communication and once with
each algorithm but `async_model_average`, every time from the same weights and on the same batches. A table tells how
well the mean of the ranks' networks reads images that no rank has trained on, and what each rank sent for it; a picture
shows how the loss falls with the bytes sent. The program fails if communication turns out to be needless, or an
algorithm not to learn.

Uses a GPU for each rank and NCCL where there are enough, otherwise the CPU and gloo.
"""

import argparse
import contextlib
import copy
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import baguakit as bk

TESTED = 360  # of 1,797 images
BATCH = 64
NEVER = 1_000_000_000  # steps


@dataclass(frozen=True)
class Contender:
    """A way to train.

    Attributes:
        name: that of a function in `bk.algorithms`, and after a comma what is special.
        algorithm: a rule or several, as `bk.attach` takes them.
        lr: the step size at the beginning; it falls to zero in a straight line.
        reaches: the share of the test images that it claims to read.
        momentum: of the optimizer; 0 where the algorithm has one of its own.
        needs_nodes: its ranks are divided into nodes of two.
    """

    name: str
    algorithm: bk.rules.Algorithm
    lr: float
    reaches: float = 0.95
    momentum: float = 0.9
    needs_nodes: bool = False

    @property
    def family(self) -> str:
        """What `--algorithm` calls it."""
        return self.name.split(",")[0]


# To compare another algorithm, add its line.
CONTENDERS = (
    Contender("no communication", bk.algorithms.local_sgd(every=NEVER), lr=0.05, reaches=0),
    Contender("gradient_allreduce", bk.algorithms.gradient_allreduce(), lr=0.05, reaches=0.98),
    Contender("bytegrad", bk.algorithms.bytegrad(), lr=0.05),
    Contender("bytegrad, error feedback", bk.algorithms.bytegrad(error_feedback=True), lr=0.05),
    Contender("bytegrad, hierarchical", bk.hierarchical(bk.algorithms.bytegrad()), lr=0.05, needs_nodes=True),
    Contender("power_sgd", bk.algorithms.power_sgd(rank=4), lr=0.05),
    Contender("top_k", bk.algorithms.top_k(ratio=0.01), lr=0.05),
    Contender("qadam", bk.algorithms.qadam(warmup_steps=100), lr=0.003, momentum=0),
    Contender("decentralized, AWC", bk.algorithms.decentralized(order="awc"), lr=0.03),
    Contender("decentralized, ATC", bk.algorithms.decentralized(order="atc"), lr=0.03),
    Contender("low_precision_decentralized", bk.algorithms.low_precision_decentralized(), lr=0.03),
    Contender("choco", bk.algorithms.choco(), lr=0.03),
    Contender("choco, one peer", bk.algorithms.choco(bk.topology.OnePeerExact(), gamma=1.0), lr=0.03),
    Contender("gradient_tracking", bk.algorithms.gradient_tracking(), lr=0.03),
    Contender("push_sum", bk.algorithms.push_sum(bk.topology.Exponential()), lr=0.03),
    Contender("local_sgd", bk.algorithms.local_sgd(every=8), lr=0.03),
    Contender("diloco", bk.algorithms.diloco(every=10), lr=0.03),
)


class Digits:
    """What one rank trains on, and what all are tested on: (images, labels), the same split in every run."""

    def __init__(self, rank: int, ranks: int, device: torch.device | None = None) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
        labels = torch.tensor(digits.target, device=device)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(labels.device)
        tested, trained = order[:TESTED], order[TESTED:]
        mine = trained[labels[trained] % ranks == rank]
        self.rank = rank
        self.test = images[tested], labels[tested]
        self.train = images[mine], labels[mine]

    def batches(self, steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random batches of what this rank holds."""
        images, labels = self.train
        random = torch.Generator().manual_seed(1000 * seed + self.rank)
        for _ in range(steps):
            chosen = torch.randint(len(labels), (BATCH,), generator=random).to(labels.device)
            yield images[chosen], labels[chosen]


def network() -> nn.Sequential:
    """A network of 31 thousand parameters.

    GroupNorm, since batch statistics of a rank that sees two digits say little about ten.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.GroupNorm(8, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


@dataclass(frozen=True)
class Result:
    """What became of a contender.

    Attributes:
        alone, merged: the share of the test images read, by one rank's network (the mean over ranks) and by their mean.
        bytes_per_step, between_nodes: what this rank sent, and how much of that left its node.
        distance: of the ranks' weights from their mean, before they were merged.
        curve: (bytes sent so far, test loss of the mean of the networks) at moments of the training.
    """

    contender: Contender
    alone: float
    merged: float
    bytes_per_step: float
    between_nodes: float
    distance: float
    seconds: float
    curve: list[tuple[float, float]]


def train(contender: Contender, digits: Digits, comm: bk.Comm, steps: int, seed: int) -> Result:
    """Train a new network with one algorithm. Collective."""
    device = digits.train[0].device
    torch.manual_seed(seed)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=contender.lr, momentum=contender.momentum)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps)
    batches = tqdm(digits.batches(steps, seed), contender.name, steps, leave=False, disable=comm.rank > 0 or None)
    moments, snapshots = moments_of(steps), []

    with bk.attach(model, optimizer, contender.algorithm, comm=comm) as att:
        began = time.perf_counter()
        for step, (images, labels) in enumerate(batches, start=1):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
            if step in moments:  # looked at afterwards: to average them now would hold up ranks that need not wait
                snapshots.append((att.report().bytes_sent, copy.deepcopy(model)))
        distance, report = att.consensus_distance(), att.report()
        seconds = time.perf_counter() - began
        alone = bk.primitives.mean_(accuracy(model, digits), comm)
        att.merge()

    return Result(
        contender,
        float(alone),
        float(accuracy(model, digits)),
        report.bytes_per_step,
        sum(row.bytes.get("inter", 0) for row in report.rows) / steps,
        distance,
        seconds,
        [(sent, loss(mean_model(then, comm), digits)) for sent, then in snapshots],
    )


def moments_of(steps: int, count: int = 20) -> set[int]:
    """Steps at which to look at the loss: evenly spaced on a logarithmic axis, the last among them."""
    return {round(steps ** (i / count)) for i in range(count + 1)}


def mean_model(model: nn.Module, comm: bk.Comm) -> nn.Module:
    """Overwrite a network with the mean of all ranks' networks: what `att.merge()` does, by hand."""
    bk.primitives.mean_([p.data for p in model.parameters()], comm)
    return model


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> Tensor:
    """The share of the test images that a network reads."""
    images, labels = digits.test
    return (model.eval()(images).argmax(1) == labels).float().mean()


@torch.no_grad()
def loss(model: nn.Module, digits: Digits) -> float:
    """The mean cross entropy over the test images."""
    images, labels = digits.test
    return float(cross_entropy(model.eval()(images), labels))


def most_without_communication(ranks: int) -> float:
    """What a rank may reach alone: it holds at most ⌈10 / n⌉ of the ten digits, and a tenth is for luck."""
    return (-(-10 // ranks) + 1) / 10


def broken_claims(results: Sequence[Result], ranks: int, every: bool) -> list[str]:
    """In sentences, what this program says of its algorithms and the results do not bear out."""
    found = {result.contender.name: result for result in results}
    broken = []
    silent, most = found.get("no communication"), most_without_communication(ranks)
    if silent and max(silent.alone, silent.merged) > most:
        broken.append(
            f"without communication {max(silent.alone, silent.merged):.1%} of the images were read, "
            f"more than {most:.0%}: the task shows nothing about communication"
        )
    if every:  # and so trained as long as the claims are made for
        for result in results:
            if result.merged < result.contender.reaches:
                name, least = result.contender.name, result.contender.reaches
                broken.append(f"{name} reads {result.merged:.1%} of the images and should read {least:.0%}")
        few, many = found["bytegrad"].bytes_per_step, found["gradient_allreduce"].bytes_per_step
        if few > 0.27 * many:
            broken.append(f"bytegrad sends {few / many:.1%} of the bytes of gradient_allreduce, more than 27%")
    return broken


NAME = max(len(contender.name) for contender in CONTENDERS)
HEADER = f"{'algorithm':<{NAME}}  alone  merged  sent/step   ratio   apart  seconds  as an expression"
LEGEND = """
alone     test accuracy of the ranks' own networks, the mean over ranks
merged    test accuracy of the mean of their networks
ratio     bytes sent to those of an all-reduce of the gradients
apart     root mean square distance of the ranks' weights from their mean, before it was taken"""


def row(result: Result, ranks: int) -> str:
    """A line of the table."""
    r = result
    all_reduced = 2 * (ranks - 1) / ranks * sum(4 * p.numel() for p in network().parameters())
    ratio = f"{r.bytes_per_step / all_reduced:.3f}" if ranks > 1 else "–"
    return (
        f"{r.contender.name:<{NAME}} {r.alone:>6.1%} {r.merged:>7.1%} {size(r.bytes_per_step):>10} {ratio:>7} "
        f"{r.distance:>7.3f} {r.seconds:>8.1f}  {r.contender.algorithm!r}"
    )


def size(count: float) -> str:
    """Bytes, to read."""
    return f"{count / 1000:,.1f} kB"


def draw(results: Sequence[Result], ranks: int, path: Path) -> None:
    """The loss against the bytes sent; lines and markers tell the algorithms apart where colours do not."""
    colours = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#888888"]
    styles = zip(*map(itertools.cycle, (colours, ["-", "--", "-.", ":"], "osD^v")), strict=True)
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for result, (colour, line, marker) in zip(results, styles, strict=False):
        curve = {sent: loss for sent, loss in result.curve if sent > 0}  # the last where nothing was sent in between
        style = {"color": colour, "linestyle": line, "linewidth": 1.3}
        if curve:
            style |= {"marker": marker, "markersize": 4, "markerfacecolor": "white", "label": result.contender.name}
            axes.plot(curve.keys(), curve.values(), **style)
        else:  # nothing has no place on a logarithmic axis: it is a level to compare with
            axes.axhline(result.curve[-1][1], label=f"{result.contender.name} (sends nothing)", **style)
    axes.set(xscale="log", yscale="log", xlabel="sent by a rank so far", ylabel="test loss of the mean of the networks")
    axes.set_title(
        f"Handwritten digits on {ranks} ranks, rank r holding those with d mod {ranks} = r", fontsize="medium"
    )
    axes.xaxis.set_major_formatter(EngFormatter("B"))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    """The command line, checked before anything takes time; its `contenders` are those that are to run."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits, of which each rank holds only some.")
    parser.add_argument("--algorithm", metavar="NAME", help="only this one; otherwise all, one after another")
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps for each algorithm (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("digits.png"), metavar="PICTURE", help="(%(default)s)")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --standalone --nproc_per_node=4 examples/digits.py")
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks > 10:
        parser.error(f"{ranks} ranks cannot each hold some of ten digits; start at most 10")
    if options.steps < 1:
        parser.error(f"--steps is 1 or more, not {options.steps}")
    if options.out.suffix != ".png" or not options.out.parent.is_dir():
        parser.error(f"--out is a .png file in a folder that exists, not {options.out}")
    able = [c for c in CONTENDERS if has_nodes(ranks) or not c.needs_nodes]
    options.contenders = [c for c in able if options.algorithm in (None, c.name, c.family)]
    if not options.contenders:
        families = ", ".join(dict.fromkeys(c.family for c in able))
        parser.error(f"there is no contender called {options.algorithm!r} for {ranks} ranks; choose one of: {families}")
    return options


@contextlib.contextmanager
def only_rank_0_complains() -> Iterator[None]:
    """The other ranks end in silence and as if all were well: a failure of theirs would cut rank 0 short."""
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        try:
            yield
        except SystemExit:
            sys.exit(0)


def has_nodes(ranks: int) -> bool:
    """Whether the ranks can be divided into several nodes of two."""
    return ranks >= 4 and ranks % 2 == 0


def join() -> tuple[bk.Comm, torch.device]:
    """Meet the other ranks: how to talk to them, and where to train."""
    here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
    if gpus >= here:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # the ranks share the cores: more threads would only take them from one another
        dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        place = "a GPU each, over NCCL" if gpus >= here else "on the CPU, over gloo"
        spare = f" ({gpus} GPUs are too few)" if 0 < gpus < here else ""
        print(f"{ranks} rank{'s' * (ranks > 1)}, {place}{spare}", flush=True)
    if not has_nodes(ranks):
        return bk.Comm(), device
    return bk.Comm(mesh=init_device_mesh(device.type, (ranks // 2, 2), mesh_dim_names=("inter", "intra"))), device


def main() -> int:
    """Run the contenders; return 1 if what they claim is not so."""
    with only_rank_0_complains():
        options = arguments()
    comm, device = join()
    digits = Digits(comm.rank, comm.size, device)
    say = print if comm.rank == 0 else lambda *_, **__: None

    results = []
    say(HEADER, flush=True)
    for contender in options.contenders:
        results.append(train(contender, digits, comm, options.steps, options.seed))
        say(row(results[-1], comm.size), flush=True)
    say(LEGEND)
    for result in results:
        if result.between_nodes:
            say(f"\n{result.contender.name}: of this {size(result.between_nodes)} a step go from node to node")
    broken = broken_claims(results, comm.size, every=options.algorithm is None)
    if comm.rank == 0:
        draw(results, comm.size, options.out)
        print(f"\nThe picture is {options.out.resolve()}", flush=True)
        for sentence in broken:
            print(f"digits.py: {sentence}", file=sys.stderr, flush=True)

    dist.barrier()  # nobody leaves while another still needs it
    dist.destroy_process_group()
    return 1 if broken and comm.rank == 0 else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        os._exit(130)  # at once: the other ranks have been interrupted, too, and will answer no more
