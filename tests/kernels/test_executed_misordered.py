"""Faults of ordering planted in the mean in one kernel are found: run with `--ptx ARCH` (test_executed_here.py).

Many give the right bytes in most orders, so that a comparison would not find them.
"""

import json
import os

import pytest

pytest.importorskip("triton")
from exchanges import Node, run, unlike
from misordered import PLANTED, RIGHT, planted

from ptx.faults import DeadlockFault
from ptx.ranks import drawn

ORDERS = 20
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("only_executed")]


@pytest.fixture(scope="module")
def table():
    """Collect, for each fault, in how many orders it was found, and in how many all bytes were right.

    Append them as lines of JSON to the file that EXECUTED_FAULTS names.
    """
    rows: dict = {}
    yield rows
    print()
    lines = [{"fault": n, "kinds": kinds, "found": f, "right": r, "of": ORDERS} for n, (kinds, f, r) in rows.items()]
    print("\n".join(map(json.dumps, lines)))
    if path := os.environ.get("EXECUTED_FAULTS"):
        with open(path, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def tried(fault, name, gpu, folder):
    """Return, for each of some orders, the first fault, or None, and whether all bytes were right."""
    folder = folder / f"planted_{name.replace(' ', '_')}"
    folder.mkdir()
    with planted(fault, folder) as copy:
        for order in drawn(ORDERS):
            half = max(mean.bytes for mean in fault.means)
            node = Node(fault.means[0].ranks, half, 2, begun=fault.begun, mean_=copy.mean_)
            found: list = []
            try:
                results = run(gpu, node, *fault.means, order=order, found=found)
            except DeadlockFault as stuck:
                yield [*found, stuck][0], False
            else:
                yield next(iter(found), None), not unlike(node, results, *fault.means)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name, executed_gpu, tmp_path, table):
    fault = PLANTED[name]
    firsts, right = zip(*tried(fault, name, executed_gpu, tmp_path), strict=True)
    kinds = {type(first) for first in firsts if first is not None}
    table[name] = sorted(kind.__name__ for kind in kinds), sum(first is not None for first in firsts), sum(right)
    assert kinds == set(fault.faults), [str(first) for first in firsts]


def test_a_wait_of_each_thread_with_a_barrier_behind_it_is_no_fault(executed_gpu, tmp_path):
    assert {*tried(RIGHT, "nothing", executed_gpu, tmp_path)} == {(None, True)}
