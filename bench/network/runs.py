"""Measuring cells that are not there yet, those of the same network in one launch, with a progress bar."""

import itertools
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from bench.netlab import Lab, Loopback, Ranks, obstacle

from .table import Table

UNSHAPED = "unshaped"
LIMIT = 1200.0  # seconds for a cell
MARK = "RESULT "
NETWORK = ("hosts", "rate", "nodes", "between", "flow_cap", "delay", "jitter", "loss", "slow_link")

Cell = dict[str, Any]


def measure(cells: Sequence[Cell], table: Table, module: str) -> int:
    """Run `python -m module CELLS` on the hosts of all cells that are not in the table; return how many failed.

    A cell has "hosts" and "rate" among its entries, and may have "slow_link", the rate of the last host's link, and
    other arguments of `Lab`; neighbours with the same share a launch. Rank 0 prints a line for each when it is done.
    One that fails ends the launch, and the next launch goes on behind it. Where there can be no laboratory, only what
    is neither shaped nor capped is measured.
    """
    reason = obstacle()
    if reason:
        print(f"Only the unshaped network is measured, over loopback: {reason}", file=sys.stderr)
        cells = [{**cell, "loopback": True} for cell in cells if set(network(cell)) == {"hosts"}]
    due = [cell for cell in cells if cell not in table]
    failed = 0
    with tqdm(initial=len(cells) - len(due), total=len(cells), unit="cell", dynamic_ncols=True) as bar:
        for wanted, together in itertools.groupby(due, key=network):
            slow, left = wanted.get("slow_link"), list(together)
            given = {name: value for name, value in wanted.items() if name != "slow_link"}
            while left:
                with Loopback(**given) if reason else Lab(**given) as lab:
                    if slow is not None:
                        lab.set_rate(lab.hosts - 1, slow)
                    ranks = lab.start([sys.executable, "-m", module, json.dumps(left)])
                    words = follow(ranks, left, table, bar)
                if left:
                    failed += 1
                    table.fail(left[0], words.strip().splitlines()[-1])  # all of them hold paths of this machine
                    tqdm.write(f"failed: {left[0]}\n{words}", file=sys.stderr)
                    del left[0]
                    bar.update()
    return failed


def network(cell: Cell) -> Cell:
    """The network of a cell: the arguments of its laboratory, and "slow_link", where they are given."""
    return {name: cell[name] for name in NETWORK if cell.get(name, UNSHAPED) not in (None, UNSHAPED)}


def follow(ranks: Ranks, left: list[Cell], table: Table, bar: Any) -> str:
    """Add results as they come, taking their cells from `left`; return why it ended, to be read if any are left."""
    seen, moved, over, timeout = 0, time.monotonic(), False, None
    announce(bar, left)
    while not over:
        time.sleep(0.2)
        over = ranks.over()
        if time.monotonic() - moved > LIMIT:
            over, timeout = True, 0.0
        if over:
            ended = ranks.wait(timeout)
        lines = ranks.lines[0][seen:]
        seen += len(lines)
        for line in lines:
            if line.startswith(MARK):
                table.add(left.pop(0), json.loads(line.removeprefix(MARK)))
                bar.update()
                announce(bar, left)
                moved = time.monotonic()
    by_itself = [text for text, status in zip(ended.outputs, ended.statuses, strict=True) if status not in (0, 143)]
    return f"status {ended.status}: {by_itself[0][-2000:] if by_itself else 'no rank says why'}"


def announce(bar: Any, left: Sequence[Cell]) -> None:
    """Let the bar say what is being measured."""
    if left:
        bar.set_description(" · ".join(str(value) for value in left[0].values()))
