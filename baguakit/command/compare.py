"""The subcommand `compare`: algorithms, of this package or of a user, by seconds and bytes to the same loss."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ..arguments import real
from ..compare import compose, trials
from ..compare.compose import rows, targets
from ..compare.contenders import DDP, contender
from ..compare.names import named, split
from ..compare.pacing import bits_per_second, written
from ..compare.table import Table, in_words
from ..compare.training import GPT, OPTIMIZERS, Task
from ..compare.trials import Comparison, Job
from .ranks import launched
from .screen import refusing, say

AGAINST = "ddp,powersgd_hook,bytegrad,local_sgd,diloco"
DESCRIPTION = """\
Train with each algorithm on this machine, and tell after how many seconds and
bytes it reaches DDP's loss over a slow network. An algorithm is MODULE:NAME (a
value or function of yours), a name such as bytegrad, or an expression. Learning
rates are tried equally. Results are kept, and a second run adds to them.
"""
SAYS = (
    "Losses by step were recorded over loopback. Seconds and bytes of a step were measured on {hosts} ranks of this "
    "machine, each paced at {rate}. Seconds and MB to a loss are composed of both. Only free-running trainings, such "
    "as those of async_model_average, were paced from beginning to end."
)


def fill(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("algorithms", nargs="*", metavar="ALGORITHM", help="MODULE:NAME, a name or an expression")
    add("--against", default=AGAINST, metavar="NAMES", help="others, besides DDP (%(default)s)")
    add("--optimizer", choices=OPTIMIZERS, help="for ALGORITHM; sgd if it has its own (adamw)")
    add("--lr", type=float, help="for ALGORITHM, of the first trial (5e-4)")
    add("--task", default=GPT, metavar="MODULE:FUNCTION", help="model, loss and validation (a small GPT)")
    add("--rate", default="100mbit", help="at which each rank may send (%(default)s)")
    add("--hosts", type=int, default=4, metavar="N", help="ranks (%(default)s)")
    add("--seeds", type=int, default=1, metavar="N", help="of whole trainings (%(default)s)")
    add("--steps", type=int, default=180, metavar="N", help="of DDP; half as many more of the others (%(default)s)")
    add("--trials", type=int, default=3, metavar="N", help="of learning rates, for each (%(default)s)")
    add("--minutes", type=float, metavar="M", help="name what does not fit into them")
    add("--out", type=Path, default=Path("compared"), metavar="DIR", help="of the results (%(default)s)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Do what the results lack; write the table and the picture. Return 1 if something failed or is missing, else 0."""
    with refusing():
        made = comparison(options)
        options.out.mkdir(parents=True, exist_ok=True)
        table = Table(options.out / "results.jsonl")
    failed: dict[str, str] = {}
    say(f"{len(made.contenders)} algorithms, {made.hosts} ranks at {made.rate}; task {made.task}")
    end = math.inf if options.minutes is None else time.monotonic() + 60 * options.minutes
    try:
        trials.run(made, made.jobs(table, failed), table, failed, end, progress(made, table, failed))
    except SystemExit:
        conclude(made, table, failed, options.out)
        say(f"Interrupted. The results so far are kept in {options.out}; the same command goes on from there.")
        raise
    return int(conclude(made, table, failed, options.out))


def comparison(options: argparse.Namespace) -> Comparison:
    """Return what the options ask for; raise a ValueError that names an impossible one."""
    if launched() or sys.platform != "linux":
        raise ValueError("compare starts its ranks itself, on Linux, without torchrun")
    real("--minutes", 1.0 if options.minutes is None else options.minutes, above=0)
    if not callable(named(options.task, "a task")):
        raise ValueError(f"{options.task} is not a function; a task is a function of (seed, rank, ranks)")
    own = {name: value for name in ("optimizer", "lr") if (value := getattr(options, name)) is not None}
    others = [contender(name) for name in split(options.against) if name]
    every = tuple(dict.fromkeys([DDP, *(contender(text, **own) for text in options.algorithms), *others]))
    steps, asked = options.steps, ("hosts", "rate", "seeds", "trials", "steps")
    sizes = {name: getattr(options, name) for name in asked}
    task = Task(options.task, warmup=min(50, max(1, steps // 6)), every=max(1, steps // 12))
    return Comparison(every, task, **sizes, longest=steps + steps // 2, tried=max(1, steps // 3))


def progress(made: Comparison, table: Table, failed: Mapping[str, str]) -> Callable[[Job], None]:
    """Return a function that says what is left before each job."""

    def left() -> int:
        return sum(sum(made.lacking(table, each).values()) for each in made.contenders if each.name not in failed)

    total, began = left(), time.monotonic()

    def tell(job: Job) -> None:
        done = total - left()
        rest = f", about {(time.monotonic() - began) / 60 * (total - done) / done:.0f} min left" if done else ""
        say(f"{done / total:4.0%}{rest}: {job}")

    return tell


def conclude(made: Comparison, table: Table, failed: Mapping[str, str], folder: Path) -> bool:
    """Write and print what the results tell; return whether something is missing."""
    found, goals, rate = rows(made, table), targets(made, table), written(bits_per_second(made.rate))
    title = f"{made.hosts} ranks at {rate}"
    lacks = {each.name: made.lacking(table, each) for each in made.contenders if each.name not in failed}
    notes = [f"{name} failed: {error}" for name, error in failed.items()]
    notes += [f"{name} is not complete; missing: {', '.join(parts)}." for name, parts in lacks.items() if parts]
    lines, missing = [f"# {title}", ""], bool(notes)
    notes[:0] = [SAYS.format(hosts=made.hosts, rate=rate)] if table.machines else []
    if found and goals:
        lines += compose.table_of(found, goals, made.steps)
        for row in found:
            gain = compose.gain(row, found, goals[-1])
            say(f"{row.contender.name}: {compose.time_to(row, goals[-1])} s to DDP's loss of {goals[-1]:.3f}, {gain}")
        label = next(name for _, result in table for name in result.get("scores", ()))  # of the task
        try:
            compose.draw(found, goals[-1], title, label, [folder / "loss.png", folder / "loss.svg"])
            lines += ["", "![The loss](loss.png)"]
        except ModuleNotFoundError as error:
            notes.append(str(error))
    notes += [f"Measured on {in_words(on)}." for on in table.machines]
    (folder / "table.md").write_text("\n\n".join(["\n".join(lines), *notes, ""]))
    say("\n".join(["", *notes, f"The results are in {folder}: {', '.join(sorted(map(str, folder.iterdir())))}"]))
    return missing
