"""The command line: `python -m baguakit.net build` and `python -m baguakit.net measure`."""

import argparse
import sys
from collections.abc import Sequence

from .link import PORT, Layout, measure, serve
from .plugin import build
from .settings import SocketSettings, nccl_socket_settings

HERE = "127.0.0.1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (OSError, RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m baguakit.net", description="TCP for NCCL")
    commands = parser.add_subparsers(required=True)

    one = commands.add_parser("build", help="compile the NCCL network plugin")
    one.add_argument("--out", metavar="DIR", help="where to put it (default: ~/.cache/baguakit)")
    one.set_defaults(run=_build)

    two = commands.add_parser("measure", help="measure the link between two machines")
    side = two.add_mutually_exclusive_group(required=True)
    side.add_argument("--server", action="store_true", help="wait for clients, until interrupted")
    side.add_argument("--client", metavar="HOST", help="measure the link to the machine where --server runs")
    two.add_argument("--port", type=int, default=PORT, help="of the server (default: %(default)s)")
    two.add_argument("--bind", metavar="ADDRESS", default=HERE, help="of the server (default: %(default)s)")
    two.add_argument("--seconds", type=float, default=1.0, help="for each measurement (default: %(default)s)")
    two.set_defaults(run=_measure)
    return parser


def _build(options: argparse.Namespace) -> None:
    path = build(options.out)
    print(f"export NCCL_NET_PLUGIN={path}")
    print('with NCCL_DEBUG=INFO, NCCL must then say "Using network baguanet"', file=sys.stderr)


def _measure(options: argparse.Namespace) -> None:
    if options.server:
        serve(options.bind, options.port, ready=_announce)
        return
    rates = measure(options.client, options.port, seconds=options.seconds)
    print(_table(rates), file=sys.stderr)
    print(_exports(nccl_socket_settings(rates)))


def _announce(address: str, port: int) -> None:
    alone = ", for this machine alone; --bind ADDRESS lets others in" * (address == HERE)
    print(f"waiting on {address} port {port}{alone}; end with Ctrl-C", flush=True)


def _table(rates: dict[Layout, float]) -> str:
    rows = [f"{t:>7}  {s:>14}  {rate / 1e6:>10.1f}" for (t, s), rate in sorted(rates.items())]
    return "\n".join(["threads  sockets/thread        MB/s", *rows])


def _exports(settings: SocketSettings) -> str:
    return "\n".join(f"export {name}={value}" for name, value in settings.environment().items())


if __name__ == "__main__":
    sys.exit(main())
