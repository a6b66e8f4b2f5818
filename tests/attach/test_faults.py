"""Ranks die at every point of an attachment's life: the others name the right one in time, or finish."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from cells import AT_ONCE, Cell, all_cells, run
from faults import POINTS, owner_of
from lives import ALGORITHMS

pytestmark = pytest.mark.filterwarnings("default:run again")  # shown at the end of the tests, and no error
SLACK = 2.0  # seconds more, in which a busy machine may not have let a survivor run
LONGER = 20.0  # seconds that attach() is given where a cell is run again
OF_TIME = re.compile(
    r" is late|within (?:the timeout of )?[\d.]+ s|spoke after|no sign of it for| failed on rank \d|not reach the store"
)
BYTEGRAD = "bytegrad(MinMaxUInt8(block=64))"
FEW = (
    Cell(BYTEGRAD, "before attach", 1, "rank 0"),
    Cell(BYTEGRAD, "its plan is told", 2, "parent"),
    Cell("choco()", "all have agreed", 0, "parent"),
    Cell("choco()", "before a stage's state", 1, "rank 0"),
    Cell("gradient_tracking()", "second message", 2, "rank 0"),
    Cell("gradient_allreduce()", "recut makes groups", 1, "rank 0"),
    Cell("gradient_allreduce()", "first line of attach", 0, "rank 0"),
    Cell("decentralized()", "first line of attach", 1, "rank 0", "asleep"),
    Cell("decentralized(order='atc')", "last line of attach", 0, "rank 0", "ends"),  # and does not detach
)
IN_THE_OPEN = (  # where the host's own thread is, which may sleep while the others work
    "before attach",
    "after the monitor",
    "all have agreed",
    "last line of attach",
    "first forward",
    "before a step",
    "before merge",
    "before recut",
    "before another parameter",
)
AT_FAULT = re.compile(
    r"rank (\d+) (?:is dead|is late|has left|raised(?! PeerError)|has diverged|could not)|failed on rank (\d+)|"
    r"(which rank 0 or torchrun holds|the process that holds it, rank 0 or torchrun, is gone)"
)


def test_every_point_is_in_a_function_of_the_package():
    for point in POINTS.values():
        for where in filter(None, (*point.where, point.since)):
            owner, name = owner_of(where)
            assert callable(getattr(owner, name)), where


@pytest.mark.slow
def test_ranks_die_here_and_there():
    check(FEW, at_once=len(FEW))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_die_everywhere(algorithm):
    check(all_cells([algorithm]))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mishap", ["asleep", "stopped"])
def test_ranks_stand_still(mishap):
    check(
        [
            replace(cell, mishap=mishap)
            for cell in all_cells([BYTEGRAD, "decentralized()", "local_sgd(every=2)"], IN_THE_OPEN)
        ]
    )


def check(cells: Sequence[Cell], at_once: int = AT_ONCE) -> None:
    """Raise, with all that is wrong, unless every survivor names the right rank in time, or finishes.

    A rank that a busy machine has kept from running is late after 4 s, and taken for dead after 1.6 s, and the others
    are right to name it; whoever does not find out in time why a message failed says only where; and rank 0, which has
    the store, waits 1.6 s at its end for those that have not read there who is at fault. Where all that is wrong is of
    time, the same cell is run again, by itself and with a longer limit, and has to be right then.
    """
    found = faults_of(cells, at_once)
    again = [cell for cell, said in found.items() if all(map(OF_TIME.search, said))]
    for cell in again:
        warnings.warn(f"run again with {LONGER:.0f} s: {cell}: {found.pop(cell)}", stacklevel=2)
        found |= faults_of([replace(cell, timeout=LONGER)], 1)
    assert not found, "\n".join(f"{cell}: {said}" for cell, sentences in found.items() for said in sentences)


def faults_of(cells: Sequence[Cell], at_once: int) -> dict[Cell, list[str]]:
    """Run cells; return the faults of those that have some, in sentences."""
    return {cell: said for cell, left in zip(cells, run(cells, at_once), strict=True) if (said := wrong(cell, left))}


def wrong(cell: Cell, left: dict[str, Any]) -> list[str]:
    """Return the faults of a cell, in sentences."""
    struck = left["struck"]
    return [
        f"rank {rank} {complaint}"
        for rank, said in left["ranks"].items()
        if rank != cell.victim or struck is None
        for complaint in complaints(cell, struck, said)
    ]


def complaints(cell: Cell, struck: float | None, said: dict[str, Any]) -> list[str]:
    """Return the faults of a survivor, in sentences."""
    found, error, blamed = [], said.get("error", ""), named(said.get("error", ""))
    right = {str(cell.victim)} | ({"store"} if cell.victim == 0 and cell.holder == "rank 0" else set())
    if said["status"] != 0:
        found.append(f"ended with {said['status']}: {error} {said['stderr'][-400:]}")
    if struck is None and error:
        found.append(f"raised {error} though nothing happened")
    elif error:
        if not error.startswith("PeerError: ") or not blamed or not blamed <= right:
            found.append(f"blames {sorted(blamed) or 'nobody'}: {error}")
        if (seconds := said["at"] - waiting_since(struck, said["parts"])) > 1.25 * cell.timeout + SLACK:
            found.append(f"spoke after {seconds:.1f} s: {error}")
        if said["trace"].count("Traceback") != 1:
            found.append(f"shows more than one traceback: {said['trace']}")
    if "Traceback" in said["stderr"]:
        found.append(f"wrote to stderr: {said['stderr'][-600:]}")
    return found


def waiting_since(struck: float, parts: Sequence[tuple[float, int]]) -> float:
    """When a survivor began to wait: a rank that was between two parts of its life may come late to the next one."""
    inside = sum(step for at, step in parts if at <= struck)
    return struck if inside else next((at for at, step in parts if at > struck), struck)


def named(sentence: str) -> set[str]:
    """The ranks that a sentence says to be at fault; "store" for whoever holds that. A PeerError blames another."""
    return {rank or itself or "store" for rank, itself, _ in AT_FAULT.findall(sentence)}
