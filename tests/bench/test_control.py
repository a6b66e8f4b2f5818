"""The benchmark of the control plane: what it has measured, its page, and the program by itself."""

import pytest

from bench.control import page
from bench.control.cells import JUDGE, LOST, SIZES, measured, slow_cell, slowly
from bench.network.table import RESULTS, Table

TABLE = Table(RESULTS / "control.jsonl")


def test_the_page_is_that_of_the_results(tmp_path):
    assert page.write(TABLE, tmp_path / "README.md").read_text() == page.PAGE.read_text()


def test_what_was_measured_does_not_grow_with_the_number_of_ranks():
    """Read from the results, as far as they have been measured."""
    for lost in (LOST, JUDGE):
        found = [TABLE[cell] for size in SIZES if (cell := {"ranks": size, "lost": lost}) in TABLE]
        rates = [each[rate] for each in found for rate in ("each", "most")]
        assert max(rates, default=0) <= 1.2 * min(rates, default=0) and max(rates, default=0) <= 3
        assert not found or found[-1]["last"] <= 1.5 * found[0]["last"]
    assert slow_cell()[0] not in TABLE or TABLE[slow_cell()[0]]["alarms"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("lost", [LOST, JUDGE])
def test_a_few_ranks_are_measured(lost):
    """It takes half a minute: a rank is dead after fifteen seconds."""
    found = measured(4, lost, 2.0)  # raises unless all name the rank that was lost
    assert 0 < found["first"] <= found["named"] <= found["last"]


@pytest.mark.slow
def test_a_slow_store_is_measured():
    assert slowly(4, 5.0, 10)["alarms"] == 0
