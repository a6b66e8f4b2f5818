"""Simulations beside the laboratory: steps by algorithm and network, and the goodput of ranks that are killed."""

import pytest
from commands import ROOT

from bench.elastic import page
from bench.elastic.cells import KILLS
from bench.elastic.simulated import simulated
from bench.network import simulated as steps
from bench.network.table import RESULTS, Table

FAR = {("diloco", "1gbit", True)}  # not within 15 %: the hosts computed faster in that run


def test_steps_of_a_second_are_those_of_the_laboratory():
    cells = [*steps.cells()]
    every = {(cell.name, cell.rate, cell.straggler): cell.error for cell in cells}
    assert len(every) == 24 and {cell for cell, error in every.items() if abs(error) > steps.NEAR} == FAR
    text = (ROOT / "docs" / "situations" / "what_you_have.md").read_text()
    assert steps.table(cells) in text and f"{len(every) - len(FAR)} of {len(every)} cells are within 15 %" in text


CELLS = [
    (cell, found)
    for cell, found in Table(RESULTS / "elastic.jsonl")
    if cell["event"] in KILLS and cell["algorithm"] != page.TORCHFT
]


@pytest.mark.parametrize("cell, found", CELLS, ids=[f"{c['algorithm']}-{c['event']}-{c['rate']}" for c, _ in CELLS])
def test_goodput_with_kills_is_that_of_the_laboratory(cell, found):
    measured = page.goodput(found, cell["hosts"])
    assert simulated(cell, page.undisturbed(found, cell["hosts"])) == pytest.approx(measured, rel=steps.NEAR)
