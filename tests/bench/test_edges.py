"""The benchmark of late, stopped and killed hosts, without training: its counts, and the table that it fills."""

from pathlib import Path

import pytest

from bench.elastic.crew import Trainee
from bench.elastic.edges import PATH, pause, speed, table
from bench.network.table import Table

PAGE = Path(__file__).parents[2] / "docs" / "windows.md"


def test_steps_under_way_count_by_their_share():
    one = Trainee(0, None, None)
    one.steps = [(t, i, 8) for i, t in enumerate((1.0, 2.0, 4.0, 4.5, 9.5))]
    assert speed(one, 1.0, 4.0) == 2 / 3
    assert speed(one, 1.5, 3.0) == pytest.approx((0.5 + 0.5) / 1.5)
    assert speed(one, 7.0, 12.0) == pytest.approx(0.5 / 5)
    assert pause(one, 1.0) == 5.0 and pause(one, 9.5) == float("inf")


def test_the_page_has_the_table_of_the_results():
    assert "\n".join(table(Table(PATH))) in PAGE.read_text()
