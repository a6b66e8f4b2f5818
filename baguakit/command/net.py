"""The subcommands `net build` and `net measure`: the NCCL plugin, and the link between two machines."""

import argparse
import sys

from ..net.link import PORT, measure, nccl_socket_settings, serve
from ..net.plugin import build
from .screen import refusing

HERE = "127.0.0.1"


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands `build` and `measure`."""
    commands = parser.add_subparsers(required=True, title="subcommands")

    one = commands.add_parser("build", help="compile the NCCL network plugin")
    one.add_argument("--out", metavar="DIR", help="the directory of the library (default: ~/.cache/baguakit)")
    one.set_defaults(run=_build)

    two = commands.add_parser("measure", help="measure the link between two machines")
    side = two.add_mutually_exclusive_group(required=True)
    side.add_argument("--server", action="store_true", help="wait for clients, until interrupted")
    side.add_argument("--client", metavar="HOST", help="measure the link to the machine where --server runs")
    two.add_argument("--port", type=int, default=PORT, help="of the server (default: %(default)s)")
    two.add_argument("--bind", metavar="ADDRESS", default=HERE, help="of the server (default: %(default)s)")
    two.add_argument("--seconds", type=float, default=1.0, help="for each measurement (default: %(default)s)")
    two.set_defaults(run=_measure)


@refusing(1, RuntimeError)
def _build(options: argparse.Namespace) -> int:
    print(f"export NCCL_NET_PLUGIN={build(options.out)}")
    print("export NCCL_NET_PLUGIN_REF_COUNT=1")  # else NCCL 2.28.3 to 2.29.7 drop the plugin with the communicator
    print('a rank that sends over it then says "baguanet: NCCL sends over this plugin"', file=sys.stderr)
    return 0


@refusing(1)
def _measure(options: argparse.Namespace) -> int:
    if options.server:
        local = ", for this machine only; pass --bind ADDRESS for others"

        def announce(address: str, port: int) -> None:
            print(f"waiting on {address} port {port}{local * (address == HERE)}; end with Ctrl-C", flush=True)

        serve(options.bind, options.port, ready=announce)
        return 0
    rates = measure(options.client, options.port, seconds=options.seconds)
    rows = [f"{t:>7}  {s:>14}  {rate / 1e6:>10.1f}" for (t, s), rate in sorted(rates.items())]
    print("threads  sockets/thread        MB/s", *rows, sep="\n", file=sys.stderr)
    for name, value in nccl_socket_settings(rates).environment().items():
        print(f"export {name}={value}")
    return 0
