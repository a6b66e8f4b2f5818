"""The subcommand `net build`: the NCCL plugin."""

import argparse
import sys

from ..net import build
from .screen import refusing


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand `build`."""
    commands = parser.add_subparsers(required=True, title="subcommands")
    one = commands.add_parser("build", help="compile the NCCL network plugin")
    one.add_argument("--out", metavar="DIR", help="the directory of the library (default: ~/.cache/baguakit)")
    one.set_defaults(run=_build)


@refusing(1, RuntimeError)
def _build(options: argparse.Namespace) -> int:
    print(f"export NCCL_NET_PLUGIN={build(options.out)}")
    print("export NCCL_NET_PLUGIN_REF_COUNT=1")  # else NCCL 2.28.3 to 2.29.7 drop the plugin with the communicator
    print('a rank that sends over it then says "baguanet: NCCL sends over this plugin"', file=sys.stderr)
    return 0
