"""The subcommands `probe` and `plan`, which run on the ranks of torchrun."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..comm import Comm, on_all
from ..compare.names import algorithm, called, named, split
from ..rules import Algorithm
from ..tune import Network, plan, probe
from ..tune.planning import compressors_in, every
from .ranks import joined, launched
from .screen import Refusal, refusing, say

START = """\
`baguakit {name}` runs on the ranks of torchrun. On one machine:

    torchrun --standalone --nproc_per_node=4 -m baguakit {command}

On two machines, HOST being the address of the first, eth0 the network interface
between them, and --node_rank=1 on the second:

    export GLOO_SOCKET_IFNAME=eth0
    torchrun --nnodes=2 --node_rank=0 --nproc_per_node=1 --master_addr=HOST \\
        --master_port=29400 -m baguakit {command}"""
NEAR = 0.95  # of the best rate: repeated measurements differ by about 5 %
MOST_THREADS = 16  # of an NCCL connection, which has 64 sockets at most, as many as `probe` tries


def fill_probe(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure the network between the ranks of torchrun: the latency α and the bandwidth 1/β of messages and of "
        "all-reduces over several numbers of connections, and how fast this machine compresses."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the results, for bk.tune.Network.from_json")
    fill(parser, "probe", run_probe)


def fill_plan(parser: argparse.ArgumentParser) -> None:
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
    threads, sockets = nccl_sockets(network)
    best = threads * sockets
    if best > 1 and network.device == "cpu" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) < comm.size:
        say(f"\n{best} connections carry most. If NCCL sends over this network, export before it starts:\n")
        say(f"    export NCCL_SOCKET_NTHREADS={threads} NCCL_NSOCKS_PERTHREAD={sockets}")
    if options.json:
        on_all(comm, lambda: options.json.write_text(network.to_json()) if comm.rank == 0 else 0, "plan")


def nccl_sockets(network: Network) -> tuple[int, int]:
    """Return NCCL's threads, and sockets of each thread, for the fewest connections with 95 % of the best rate.

    A measured connection has a thread of its own, and so has each socket, as far as NCCL's limit allows.
    """
    links = [link for link in network.links if link.part == ("inter" if network.per_node > 1 else "flat")]
    enough = NEAR * max((link.exchange.rate for link in links), default=0.0)
    flows = min((link.flows for link in links if link.exchange.rate >= enough), default=1)
    threads = max(n for n in range(1, MOST_THREADS + 1) if flows % n == 0)
    return threads, flows // threads


def run_plan(options: argparse.Namespace, comm: Comm) -> None:
    """Measure the network, and print a table of predictions for a model, and the recommended call of `bk.attach`."""
    model = on_all(comm, lambda: model_of(options.model), "plan")
    asked = options.algorithms or {}
    network = measured(options, comm, compressors=compressors_in(list(asked or every())))
    made = plan(model, comm, network, (options.step_ms or 0.0) / 1e3, list(asked) or None)
    counted = "" if options.step_ms else ", without computation, since --step-ms is not given"
    say(f"Predicted by a model of that network, not measured{counted}:\n")
    say(str(replace(made, calls={**asked, **made.calls})))


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
    """Return {algorithm: its name} for names such as "bytegrad,train:mine"; raise a Refusal if one is invalid."""
    try:
        found = {text: algorithm(text) for text in split(names)}
    except ValueError as error:
        raise Refusal(f"--algorithms: {error}") from None
    return {each: text for text, each in found.items()}


def numbers(text: str) -> tuple[int, ...]:
    """Return the whole numbers in a text such as "1,4". Argparse says what a ValueError refuses."""
    return tuple(map(int, text.split(",")))
