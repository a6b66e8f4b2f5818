"""Faults of ordering planted in exchanges in one hop are found: run with `--ptx ARCH` (test_executed_here.py)."""

import pytest

pytest.importorskip("triton")
from misordered import planted
from misordered_rows import PLANTED
from row_exchanges import Place, run, unlike
from test_executed_misordered import ORDERS, table  # noqa: F401

from ptx.faults import DeadlockFault
from ptx.ranks import drawn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("only_executed")]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name, executed_gpu, tmp_path, table):  # noqa: F811
    fault, firsts, right = PLANTED[name], [], 0
    folder = tmp_path / f"rows_{name.replace(' ', '_')}"
    folder.mkdir()
    with planted(fault, folder, "rows_gpu") as copy:
        for order in drawn(ORDERS):
            place, found = Place(fault.means, kernels=copy), []
            try:
                results, _, _ = run(executed_gpu, place, *fault.means, order=order, found=found)
                right += not unlike(results, *fault.means)
            except DeadlockFault as stuck:
                found.append(stuck)
            firsts += found[:1]
    table[name] = sorted({type(each).__name__ for each in firsts}), len(firsts), right
    assert {type(each) for each in firsts} == set(fault.faults), [str(each) for each in firsts]
