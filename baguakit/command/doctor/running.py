"""The subcommand `doctor`: what will run on this machine, what will not, and the commands that mend it."""

import argparse
from collections.abc import Iterable
from typing import Any

from ..screen import Column, Table, say
from . import extras, machine
from .finding import Finding, Kind

COLUMNS = (Column("what", 13), Column("", 7), Column("found, and what to do", 56))
STYLES = {Kind.GOOD: "", Kind.NOTE: "", Kind.LACKS: "yellow", Kind.BROKEN: "bold red"}

DESCRIPTION = """\
Tell what of baguakit will run on this machine, what will not, and the pip or
apt command that mends it. It looks at Python, torch, NumPy, Triton, GPUs, NCCL,
compilers, network interfaces and optional packages, and lets two processes
average a tensor over loopback. The exit status is 1 if the core cannot work.
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show every finding; return 1 if the core cannot work."""
    checks = (*machine.CHECKS, extras.packages)
    found = []
    with Table(COLUMNS, len(checks)) as table:
        for check in checks:
            table.step(check.__name__.replace("_", " "), 0)
            for finding in check():
                found.append(finding)
                show(finding, table)
            table.step("", 1)
    say()
    for sentence in verdict(found):
        say(sentence)
    return int(any(each.kind is Kind.BROKEN for each in found))


def show(finding: Finding, table: Table) -> None:
    """Add a finding to the table, and the command that mends it in a row below."""
    style = STYLES[finding.kind]
    table.row(finding.what, finding.kind.value, finding.found, style=style)
    if finding.mend:
        table.row("", "", finding.mend, style=style)


def verdict(found: Iterable[Finding]) -> Iterable[Any]:
    """Yield what will run and what will not, in sentences."""
    lost = [each for each in found if each.loses]
    core = "The core cannot work." if any(each.kind is Kind.BROKEN for each in found) else "Training on CPUs will run."
    yield core
    yield from (f"{each.loses}." for each in lost)
