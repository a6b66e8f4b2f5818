"""The quality that few averages cost, by the number of ranks: `python -m bench.frontier.by_ranks`, or with EXPRESSIONS.

It prints a table of docs/algorithms.md, after it has trained what is not in bench/results/frontier-ranks.jsonl yet.
The ranks of an algorithm are processes, and their exchanges are real, over loopback. But one process computes the steps
of all ranks at once, on weights that it shares with them. DDP is one process that steps on the gradient of the mean
loss of all ranks' windows, which is what DDP computes. Every rank has 2 windows of 64 bytes in a step, as on the
frontier: more ranks see more tokens.
"""

import argparse
import itertools
import math
import statistics
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

import baguakit as bk
from baguakit.compare import language
from baguakit.compare.names import algorithm
from baguakit.compare.table import Table
from baguakit.tune.prediction import every_of
from bench.network.table import RESULTS

PATH = RESULTS / "frontier-ranks.jsonl"
RANKS, SEEDS, LR, EVERY = (2, 4, 8, 16), (1, 2), 2e-3, 16
ROWS = (*((n, 50) for n in RANKS), (2, 200), (4, 200))  # (ranks, rounds) of the table
FOUR_BITS = "inner=ErrorFeedback(CompressedMean(UInt4()))"
PAPER = "lr=0.7, momentum=0.9, nesterov=True"
WARM_UP = 50  # steps


@dataclass(frozen=True)
class Trial:
    """A training of a GPT over bytes: `expression` is an algorithm, or "DDP"."""

    expression: str
    ranks: int
    lr: float
    steps: int = 300
    seed: int = 1
    layers: int = 2
    width: int = 64
    heads: int = 2
    optimizer: str = "adamw"
    every: int = 100  # steps between validations

    @property
    def cell(self) -> dict[str, Any]:
        """Return what its result depends on."""
        return {**asdict(self), "batch": language.BATCH, "text": language.text(language.CONTEXT)[2]}


class Player:
    """The ranks' weights, one after another for each parameter, and a step of all of them."""

    def __init__(self, trial: Trial, path: str) -> None:
        self.trial, self.alone = trial, trial.expression == "DDP"
        torch.manual_seed(trial.seed)
        self.model = language.GPT(trial.layers, trial.width, trial.heads)
        self.copies = 1 if self.alone else trial.ranks
        named = dict(self.model.named_parameters())
        values = sum(p.numel() for p in named.values())
        parts = torch.from_file(path, shared=True, size=self.copies * values, dtype=torch.float32).split(
            [self.copies * p.numel() for p in named.values()]
        )
        shapes = [(self.copies, *p.shape) for p in named.values()]
        self.stacks = {name: part.view(shape) for name, part, shape in zip(named, parts, shapes, strict=True)}

    def fill(self) -> None:
        """Begin with the model's weights on all ranks; make the optimizer of all."""
        self.windows, self.held_out, _ = language.text(language.CONTEXT)
        for name, p in self.model.named_parameters():
            self.stacks[name].copy_(p.detach())
        muon = {
            name
            for name, each in self.stacks.items()
            if self.trial.optimizer == "muon" and each.ndim == 3 and name[0] == "b"
        }
        matrices, others = (
            [each.requires_grad_() for name, each in self.stacks.items() if (name in muon) is chosen]
            for chosen in (True, False)
        )
        self.optimizers = [
            torch.optim.AdamW(others, self.trial.lr, betas=(0.9, 0.95)),
            *([Muons(matrices)] if muon else []),
        ]
        self.loss = vmap(lambda weights, windows: language.loss_of(Called(self.model, weights), windows))

    def of_rank(self, rank: int) -> nn.Module:
        """Return the model of a rank, whose weights are shared with the process that computes."""
        for name, p in self.model.named_parameters():
            p.data = self.stacks[name].detach()[rank]
        return self.model

    def step(self, number: int) -> None:
        """Take a step on all ranks, without exchange."""
        trial = self.trial
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = trial.lr * min(1.0, number / WARM_UP)
            optimizer.zero_grad()
        drawn = [language.drawn(self.windows, language.BATCH, trial.seed, number, r) for r in range(trial.ranks)]
        if self.alone:
            language.loss_of(Called(self.model, {k: v[0] for k, v in self.stacks.items()}), torch.cat(drawn)).backward()
        else:
            self.loss(self.stacks, torch.stack(drawn)).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def validate(self) -> float:
        """Return the loss of the mean of the ranks' weights, in bits per byte."""
        mean = {name: each.mean(0) for name, each in self.stacks.items()}
        called: Any = Called(self.model, mean)
        return language.bits_per_byte(called, self.held_out, 0, 1, language.HELD_OUT)


class Muons(torch.optim.Optimizer):
    """torch.optim.Muon, with its defaults and lr adjusted by "match_rms_adamw", on stacks of matrices."""

    def __init__(self, stacks: Sequence[Tensor]) -> None:
        super().__init__(stacks, {"lr": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Take a step on each matrix."""
        lr = self.param_groups[0]["lr"]
        for p in self.param_groups[0]["params"]:
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p)).lerp_(p.grad, 0.05)
            u = p.grad.lerp(momentum, 0.95).bfloat16()
            u = u.mT if (tall := u.shape[-2] > u.shape[-1]) else u
            u = u / u.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
            for _ in range(5):
                gram = u @ u.mT
                u = torch.baddbmm(u, torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), u, beta=3.4445)
            p.mul_(1 - 0.1 * lr).add_(u.mT if tall else u, alpha=-lr * 0.2 * max(p.shape[-2:]) ** 0.5)


class Called:
    """A model that is called with other weights."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        self.model, self.weights = model, weights

    def parameters(self) -> Any:
        return iter(self.weights.values())

    def __call__(self, x: Tensor) -> Tensor:
        return functional_call(self.model, self.weights, (x,))


def play(trial: Trial, path: str) -> dict[str, Any]:
    """Train; return {"losses": [(step, loss)], "bytes": that a rank sends in a step}. Collective."""
    warnings.filterwarnings("ignore", "There is a performance drop")
    comm, player, losses = bk.Comm(), Player(trial, path), list[tuple[int, float]]()
    computes = comm.rank == 0
    if computes:
        player.fill()
    comm.gather_objects(None)
    made = bk.algorithms.local_sgd(10**9) if player.alone else algorithm(trial.expression)
    calm = len(made.rules) == 1 and not made.rules[0].delay  # nothing happens between exchanges
    period = every_of(made.rules[0]) if calm else 1
    model = player.of_rank(comm.rank) if not player.alone else nn.Linear(1, 1)
    idle = torch.optim.SGD(model.parameters(), 0.0)
    with bk.attach(model, idle, made, comm=comm) as attachment:
        comm.gather_objects(None)  # all have copied the weights with which they begin
        for number in range(1, trial.steps + 1):
            if computes:
                player.step(number)
            meet = number % period == 0
            if meet:
                comm.gather_objects(None)
            idle.step()
            if meet:
                comm.gather_objects(None)
            if computes and (number % trial.every == 0 or number == trial.steps):
                losses.append((number, player.validate()))
            if computes and losses and not math.isfinite(losses[-1][1]):
                raise ValueError(f"the loss is {losses[-1][1]} after {number} steps")
        return {"losses": losses, "bytes": attachment.report().bytes_per_step}


def run(trials: Sequence[Trial]) -> None:
    """Train what has no result yet."""
    table = Table(PATH)
    due = [each for each in trials if each.cell not in table]
    for size, some in itertools.groupby(sorted(due, key=size_of), size_of):
        with bk.Ranks(size) as ranks:
            for trial in some:
                with tempfile.NamedTemporaryFile() as file:
                    table.add(trial.cell, ranks.run(play, trial, file.name)[0])
                print(trial, table[trial.cell]["losses"][-1][1], flush=True)


def size_of(trial: Trial) -> int:
    """Return the number of processes of a trial."""
    return 1 if trial.expression == "DDP" else trial.ranks


def outer(ranks: int) -> str:
    """Return an outer step for so many ranks: lr/(1 − momentum) = √ranks."""
    return f"lr=0.8, momentum={round(1 - 0.8 / math.sqrt(ranks), 2)}, nesterov=True"


def of(options: str, ranks: int, **size: Any) -> Trial:
    """Return a training with DiLoCo of 4 bits, every 16 steps."""
    return Trial(f"diloco(every={EVERY}, {options}, {FOUR_BITS})", ranks, **({"lr": LR, "steps": 800} | size))


def plan(ranks: int, rounds: int, seed: int = 1) -> tuple[Trial, Trial, Trial]:
    """Return the trainings of a row of the table: DDP, and two outer steps."""
    size = {"steps": rounds * EVERY, "seed": seed}
    return Trial("DDP", ranks, LR, **size), of(PAPER, ranks, **size), of(outer(ranks), ranks, **size)


def table() -> list[str]:
    """Return the table in Markdown: means over the seeds that all of a row have been trained with."""
    found, lines = (
        Table(PATH),
        ["| ranks | rounds | seeds | DDP | lr 0.7, momentum 0.9 | lr 0.8, momentum 1 − 0.8/√ranks |", "|---" * 6 + "|"],
    )
    for n, rounds in ROWS:
        rows = [[found[each.cell]["losses"][-1][1] for each in plan(n, rounds, seed)] for seed in SEEDS
                if all(each.cell in found for each in plan(n, rounds, seed))]  # fmt: skip
        ddp, *others = map(statistics.mean, zip(*rows, strict=True))
        shown = (f"{each:.2f} ({each / ddp - 1:+.1%})" for each in others)
        lines.append(f"| {n} | {rounds} | {len(rows)} | {ddp:.2f} | {' | '.join(shown)} |")
    return lines


def main() -> None:
    """Train what is missing and print the table, or train expressions of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("expressions", nargs="*")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8])
    parser.add_argument("--lr", type=float, nargs="*", default=[LR])
    parser.add_argument("--seed", type=int, nargs="*", default=[1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--size", type=int, nargs=3, default=[2, 64, 2], help="layers, width and heads")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw")
    given = parser.parse_args()
    product = itertools.product(given.expressions, given.ranks, given.lr, [given.steps], given.seed)
    asked = [Trial(*each, *given.size, given.optimizer) for each in product]
    run(asked or [trial for seed in SEEDS for row in ROWS for trial in plan(*row, seed)])
    print(*([] if asked else table()), sep="\n")


if __name__ == "__main__":
    main()
