"""The subcommand `demo`: ranks that see different digits train with one algorithm after another."""

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import algorithms
from ..arguments import integer
from ..comm import Comm
from ..compare.compose import Row, draw
from ..compare.contenders import Contender, contender
from ..compare.digits import DIGITS
from ..compare.pacing import Pacer, bits_per_second, check_pace, written
from ..compare.training import Task, train
from .ranks import crew, leads
from .screen import Refusal, Table, refusing, say

DESCRIPTION = """\
Train a small network on printed digits with one algorithm after another. Rank r
of n sees only the digits d with d mod n = r, so that it cannot learn the others
alone. The table shows the accuracy, the bytes sent, and the time of a step.

With --rate every rank may send only so much a second, as over a slow network.
It needs no root. Under torchrun the demo uses the ranks of torchrun, else it
starts some itself.
"""
ALONE, BASE = "no communication", "gradient_allreduce"
FIRST = {  # the default, by name
    ALONE: "local_sgd(every=10**9)",
    BASE: BASE,
    "bytegrad": "bytegrad",
    "power_sgd": "power_sgd",
    "choco, one peer": "choco(OnePeerExact(), gamma=1.0)",
    "local_sgd": "local_sgd",
    "diloco": "diloco(every=10)",
}
LR, OWN = 0.05, {"qadam": 0.002, "decoupled_momentum": 0.005, "signum": 0.01, "lion_vote": 0.01}  # learning rates
LEGEND = """
accuracy     on test images, of the mean of the ranks' networks; without
             communication, the mean over the ranks of their own accuracies
sent         by a rank; "of all-reduce" is the ratio to gradient_allreduce
faster       than gradient_allreduce, in a measured step"""
UNPACED = """

The network between these ranks is as it is. Over loopback bytes cost next to nothing, so that sending fewer saves \
little: --rate 100mbit shows the steps of a slow network."""


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rate", metavar="RATE", help='train at this rate, such as "100mbit" or "1gbit"; Linux only')
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="processes, 2 to 10 (%(default)s)")
    parser.add_argument("--steps", type=int, default=150, metavar="N", help="for each algorithm (%(default)s)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="run every algorithm; the default is the six that say most")
    which.add_argument("--algorithm", metavar="NAME", help="run this one, or MODULE:NAME, beside gradient_allreduce")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw the loss by time; needs matplotlib")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train with each algorithm, and print and draw the results."""
    with refusing():
        bits, contenders = check(options), chosen(options.algorithm, options.all)
    task = Task("baguakit.compare.digits:reading", warmup=10, every=max(1, options.steps // 20))
    with crew(options.ranks) as (size, everywhere):
        if not 2 <= size <= DIGITS:
            raise Refusal(f"the demo needs 2 to 10 ranks, as each holds some of ten digits, and there are {size}")
        place = f"{size} ranks over {everywhere(dist.get_backend)[0]}" + (f" at {written(bits)}" if bits else "")
        say(f"{place}; {options.steps} steps with each algorithm\n")
        results: dict[str, Any] = {}
        table = Table(
            {"algorithm": "<27", "accuracy": ">8", "sent\na step": ">10", "of\nall-reduce": ">10"}
            | {"a step at\n" + written(bits) if bits else "a step": ">9", "faster": ">6"}
        )
        for each in contenders:
            found = results[each.name] = everywhere(trained, each, task, options.steps, options.seed, bits / 8)[0]
            if bits and each.name == BASE:
                check_pace(found["bytes"] / found["step"], bits / 8)
            table.row(*row(each.name, found, results.get(BASE)))
    say(LEGEND + UNPACED * (not bits))
    if options.out is not None and leads():
        rows = [Row(e, (r := results[e.name])["step"], r["bytes"], e.lr or LR, [r["losses"]]) for e in contenders]
        draw(rows[1:], rows[1].final(options.steps), place, "test loss of the mean", [options.out])
        say(f"\nThe picture is {options.out.resolve()}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Return the rate in bits per second, 0 if none is asked for; raise a ValueError if an option is impossible."""
    if options.out is not None:
        if options.out.suffix != ".png" or not options.out.parent.is_dir():
            raise ValueError(f"--out is a .png file in a folder that exists, not {options.out}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--out needs matplotlib: pip install matplotlib")
    if options.rate is not None and sys.platform != "linux":
        raise ValueError("--rate needs Linux, whose sockets can be slowed down; leave it out")
    integer("--ranks", options.ranks, 2, DIGITS)
    integer("--steps", options.steps, 1)
    integer("--seed", options.seed, 0)
    return 0 if options.rate is None else bits_per_second(options.rate)


def chosen(name: str | None, every: bool) -> Sequence[Contender]:
    """Return the contenders to run: all, if `every`; if `name`, two baselines and this one; else the default."""
    texts = dict(FIRST)
    if every:
        texts |= {each: each for each in algorithms.__all__ if each not in FIRST and not each.startswith("async_")}
    elif name is not None:
        texts = {each: FIRST[each] for each in (ALONE, BASE)} | {name: FIRST.get(name, name)}
    found = [replace(contender(text), name=shown) for shown, text in texts.items()]
    if hooks := [each.name for each in found if each.peer]:
        raise ValueError(f"the demo counts the bytes of attached algorithms; compare, not demo, runs {hooks[0]}")
    return [replace(each, optimizer="momentum") if each.optimizer == "adamw" else each for each in found]


def trained(each: Contender, task: Task, steps: int, seed: int, rate: float) -> dict[str, Any]:
    """Train on this rank, which may send `rate` bytes per second if it is not 0; return the result. Collective."""
    torch.set_num_threads(1)  # ranks share the cores
    with Pacer(rate) if rate else contextlib.nullcontext():
        return train(each, task, seed, OWN.get(each.name, each.lr or LR), steps, Comm())


def row(name: str, result: Mapping[str, Any], base: Mapping[str, Any] | None) -> list[str]:
    """Return the table cells of a result, compared with `base`, the result of an all-reduce; None: not compared."""
    share, speed = "", ""
    if base is not None:
        share, speed = f"{result['bytes'] / base['bytes']:.3f}", f"{base['step'] / result['step']:.1f} ×"
    accuracy = (result["scores"] if result["bytes"] else result["alone"])["accuracy"]
    sent, step = f"{result['bytes'] / 1000:,.1f} kB", f"{result['step'] * 1e3:,.1f} ms"
    return [name, f"{accuracy:.1%}", sent, share, step, speed]
