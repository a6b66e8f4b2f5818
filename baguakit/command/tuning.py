"""The subcommands `probe` and `plan`, which run on the ranks of torchrun."""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from .. import algorithms
from ..comm import Comm
from ..comm.groups import on_all
from ..compare.names import algorithm, called, named, split
from ..rules import Algorithm
from ..tune import Network, plan, probe
from ..tune.planning import by_nodes, compressors_in, every
from .ranks import joined, launched
from .screen import Refusal, Table, refusing, say

START = """\
`baguakit {name}` runs on the ranks of torchrun. On one machine:

    torchrun --standalone --nproc_per_node=4 -m baguakit {command}

On two machines, HOST being the address of the first, eth0 the network interface
between them, and --node_rank=1 on the second:

    export GLOO_SOCKET_IFNAME=eth0
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=1 --master_addr=HOST \\
        --master_port=29400 -m baguakit {command}"""
COLUMNS = {"algorithm": "<28", "step": ">10", "sent": ">9", "to DDP": ">10", "training": "<15"}
LEGEND = """
step      of training, in the steady state{counted}
sent      by a rank, in a step
to DDP    time for the progress of a step of DDP, as measured with a small GPT
training  as DDP; gradients rounded to so many bits; or a different trajectory"""

NODES = "bk.hierarchical("


def fill_probe(parser: argparse.ArgumentParser) -> None:
    """Add the options of `probe`."""
    parser.description = (
        "Measure the network between the ranks of torchrun: the latency α and the bandwidth 1/β of messages and of "
        "all-reduces over several numbers of connections, and how fast this machine compresses."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results, for bk.tune.Network.from_json")
    fill(parser, "probe", run_probe)


def fill_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    parser.description = (
        "Measure the network between the ranks of torchrun, and predict the time of a training step with each "
        "algorithm, bucket size and number of connections. The times are predictions of a model."
    )
    parser.add_argument("model", metavar="MODULE:FUNCTION", help="a function without arguments that returns the model")
    parser.add_argument("--step-ms", type=float, metavar="MS", help="milliseconds of a step without communication (0)")
    parser.add_argument(
        "--algorithms",
        type=algorithms_of,
        metavar="NAMES",
        help="names, expressions or MODULE:NAME, in order of preference; all, of which one keeps the loss",
    )
    fill(parser, "plan train:make_model", run_plan)


def fill(parser: argparse.ArgumentParser, example: str, work: Callable[[argparse.Namespace, Comm], None]) -> None:
    """Add the options that both subcommands have; set the function that runs `work` on the ranks of torchrun.

    An error in arguments or files is printed as one sentence, and an error in the model's code as type and message.
    """
    parser.add_argument(
        "--flows", type=numbers, metavar="NUMBERS", help="numbers of connections to each peer (1,2,4,8 on CPUs)"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="that messages may take (%(default)s)")

    def run(options: argparse.Namespace) -> int:
        if not launched():
            say(START.format(command=example, name=example.split()[0]), file=sys.stderr)
            return 2
        with joined() as comm, refusing(1, Refusal):
            work(options, comm)
        return 0

    parser.set_defaults(run=run)


def run_probe(options: argparse.Namespace, comm: Comm) -> None:
    """Measure the network, and print the results; with `--json`, also save them."""
    network = measured(options, comm)
    print(network, flush=True)
    if options.json:
        on_all(comm, lambda: options.json.write_text(network.to_json()) if comm.rank == 0 else 0, "plan")


def run_plan(options: argparse.Namespace, comm: Comm) -> None:
    """Measure the network, and print a table of predictions for a model, and the recommended call of `bk.attach`."""
    model = on_all(comm, lambda: model_of(options.model), "plan")
    calls = options.algorithms or every()
    network = measured(options, comm, compressors=compressors_in(list(calls)))
    step = None if options.step_ms is None else options.step_ms / 1e3
    made = plan(model, comm, network, step, options.algorithms and list(calls))
    if comm.hierarchical:
        between = {call: by_nodes(each, comm) for each, call in calls.items()}
        calls = calls | {each: f"{NODES}{call})" for call, each in between.items() if each is not None}
    say("Predicted by a model of that network, not measured:\n")
    table = Table(COLUMNS)
    for each in made.fastest():
        to_loss = "–" if each.to_loss is None else f"{each.to_loss * 1e3:,.1f} ms"
        cells = f"{each.seconds * 1e3:,.1f} ms", f"{each.sent / 1e6:,.2f} MB", to_loss, each.effect.short
        table.row(short(calls[each.algorithm]), *cells)
    for reason in made.left_out.values():
        say(f"Left out: {reason}")
    say(LEGEND.format(counted="; without computation, since --step-ms is not given" * (step is None)))
    best = made.best
    flows = f", comm=bk.Comm(flows={best.flows})" * (best.flows > 1)
    among = "the first in --algorithms" if options.algorithms else "the first that keeps DDP's loss"
    say(f"\nThe pick: of those within 2 % of the fastest, {among}.\n")
    say(f"    bk.attach(model, optimizer, {calls[best.algorithm]}{flows},")
    say(f"              bucket_bytes={best.bucket_bytes})")


def measured(options: argparse.Namespace, comm: Comm, **more: Any) -> Network:
    """Return the measurements of the network. Print a line first, since measuring takes seconds."""
    say(f"Measuring the network between {comm.size} ranks …\n")
    return probe(comm, flows=options.flows, seconds=options.seconds, **more)


def model_of(place: str) -> nn.Module:
    """Call the function at "module:function" and return its model; raise a Refusal if that fails."""
    with refusing():
        function = named(place, "the model")
        if not callable(function):
            raise ValueError(f"{place} is a function that returns the model, not {type(function).__name__}")
        model = called(function, place)
    if not isinstance(model, nn.Module):
        raise Refusal(f"{place}() returns the model, a torch.nn.Module, not {type(model).__name__}")
    return model


def algorithms_of(names: str) -> dict[Algorithm, str]:
    """Return {algorithm: its call} for names such as "bytegrad,train:mine"; raise a Refusal if one is invalid."""
    try:
        found = {text: algorithm(text) for text in split(names)}
    except ValueError as error:
        raise Refusal(f"--algorithms: {error}") from None
    calls = {text: f"bk.algorithms.{text}()" if text in algorithms.__all__ else text for text in found}
    return {each: calls[text] for text, each in found.items()}


def numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers in a text such as "1,4"; raise a Refusal for other texts."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise Refusal(f"--flows is numbers of connections, such as 1,4, not {text!r}") from None


def short(call: str) -> str:
    """Return the short form of a call for the table, such as "bytegrad" or "bytegrad, by node"."""
    by_node = call.startswith(NODES)
    name = re.sub(r"bk\.(algorithms|compressors|topology)\.", "", call.removeprefix(NODES)[: -1 if by_node else None])
    return name.replace("error_feedback=True", "feedback").removesuffix("()") + ", by node" * by_node
