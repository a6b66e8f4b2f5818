"""The command `baguakit`, which is also `python -m baguakit`: docs/command.md shows all of it.

Files: `tuning` has `probe` and `plan`, `ranks` starts ranks or joins the ranks of torchrun, and `screen` prints tables.
`import baguakit` does not import them.
"""

import argparse
import contextlib
import io
import os
import signal
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from types import FrameType
from typing import Any

from ..net import build
from ..ranks import RankError
from . import compare, demo, doctor, tuning
from .ranks import leads
from .screen import Refusal, refusing

__all__ = ["main"]

INTERRUPTED = 130

DESCRIPTION = """\
Communication primitives for data-parallel PyTorch training on slow networks.

exit status: 0, or 1 if it failed, 2 if it was called wrongly, 130 after Ctrl-C
"""


def fill_net(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(required=True, title="subcommands")
    one = commands.add_parser("build", help="compile the NCCL network plugin")
    one.add_argument("--out", metavar="DIR", help="the directory of the library (default: ~/.cache/baguakit)")
    one.set_defaults(run=build_plugin)


@refusing(1, RuntimeError)
def build_plugin(options: argparse.Namespace) -> int:
    print(f"export NCCL_NET_PLUGIN={build(options.out)}")
    print("export NCCL_NET_PLUGIN_REF_COUNT=1")  # else NCCL 2.28.3 to 2.29.7 drop the plugin with the communicator
    print('a rank that sends over it then says "baguanet: NCCL sends over this plugin"', file=sys.stderr)
    return 0


SUBCOMMANDS = (
    ("doctor", "tell what will run on this machine, and how to mend the rest", doctor.fill),
    ("probe", "measure the network between the ranks of torchrun", tuning.fill_probe),
    ("plan", "predict a training step with each algorithm, for your model", tuning.fill_plan),
    ("demo", "train on this machine as over a slow network", demo.fill),
    ("compare", "compare algorithms, also yours, by seconds to the same loss", compare.fill),
    ("net", "build the NCCL plugin", fill_net),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit status.

    Under torchrun only rank 0 prints output, and the errors that all ranks have. The others then exit with 0: if one of
    them failed first, torchrun would end rank 0 before it prints. An OSError or RankError is printed by each rank.
    """
    before, first = signal.signal(signal.SIGINT, interrupt), leads()
    parser = argparse.ArgumentParser("baguakit", description=DESCRIPTION, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, title="subcommands")
    for name, says, fill in SUBCOMMANDS:
        fill(commands.add_parser(name, help=says, description=says[0].upper() + says[1:] + "."))
    try:
        with contextlib.nullcontext() if first else contextlib.redirect_stdout(io.StringIO()):
            with contextlib.nullcontext() if first else contextlib.redirect_stderr(io.StringIO()):
                options = parser.parse_args(arguments)
            return int(options.run(options))
    except Refusal as refusal:
        if first:
            print(f"baguakit: {refusal}", file=sys.stderr, flush=True)
        return refusal.status if first else 0
    except SystemExit as ended:
        if first or ended.code == INTERRUPTED:
            raise
        return 0
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, RankError) as error:
        print(f"baguakit: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt(number: int, frame: FrameType | None) -> Any:
    """Handle Ctrl-C: raise SystemExit with status 130. A second Ctrl-C ends the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    raise SystemExit(INTERRUPTED)
