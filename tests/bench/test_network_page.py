"""The page of networks shows whoever has been measured, installed here or not."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.network import page, steps
from bench.network.contenders import ALONE, FOUR_BITS
from bench.network.reports import of_steps
from bench.network.table import RESULTS, Table

STRANGER = "one that is not installed"
NAMES = [ALONE, "DDP", "diloco", STRANGER]  # as they must be told
SPEED = {ALONE: 0.1, "DDP": 0.4, "diloco": 0.2, STRANGER: 0.3}
MEASURED = {"compute": 0.05, "batch": 8, "formula": 1e6, "sent": 1.05e6, "payload": 1.01e6, "test_loss": 0.5}


@pytest.fixture
def table(tmp_path):
    """Every kind of cell that a figure shows, the last first."""
    table = Table(tmp_path / "network-steps.jsonl")
    places = ({}, {"rate": "100mbit"}, {"hosts": 2}, {"straggler": True})
    for place in places:
        for name in reversed(NAMES):
            taken = SPEED[name]
            result = {**MEASURED, "step": taken, "quartiles": [taken] * 3, "step_by_rank": [taken] * 4}
            table.add(steps.cell(name, **place), result | {"seconds": [taken, 2 * taken], "losses": [2.0, 1.0]})
    return table


@pytest.fixture
def figure():
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    return Figure(layout="constrained")


def test_rows_of_strangers_are_told_behind_the_others(table, tmp_path):
    lines = of_steps(table).splitlines()[1:]
    assert [next(name for name in NAMES if f" {name} " in line) for line in lines] == NAMES * 4
    assert all(" 300.000 " in line and " 1.33 " in line for line in lines[3::4])  # 0.4 s of DDP to 0.3 s
    text = page.write(tmp_path, tmp_path / "README.md").read_text()
    assert all(line in text for line in lines)


@pytest.mark.parametrize("name", ["by_bandwidth", "by_hosts", "by_time"])
def test_strangers_have_panels_of_their_own(table, figure, name):
    from bench.network import figures

    assert getattr(figures, name)(figure, figures.longest(table))
    shown = {axes.get_title(loc="left"): [line.get_label() for line in axes.lines] for axes in figure.axes}
    others = [names for title, names in shown.items() if title.startswith("Others")]
    assert others and all(names == [STRANGER] for names in others)
    assert sum(STRANGER in names for names in shown.values()) == len(others)


def test_of_the_committed_results_each_contender_is_drawn_in_panels_of_few_curves_with_their_names(figure):
    from bench.network import figures

    cells = figures.longest(Table(RESULTS / "network-steps.jsonl"))
    assert figures.by_hosts(figure, cells)
    shown = [[line.get_label() for line in axes.lines] for axes in figure.axes]
    assert max(map(len, shown)) <= 6
    assert set().union(*shown) == {cell["algorithm"] for cell, _ in cells} - {ALONE, *(each.name for each in FOUR_BITS)}
    for axes in figure.axes:
        colours = {line.get_label(): line.get_color() for line in axes.lines}
        assert len(set(colours.values())) == len(colours)
        written = {text.get_text().replace("\n", " ").replace("_ ", "_"): text.get_color() for text in axes.texts}
        assert written == colours


@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.1, 0.2])), min_size=1, max_size=6))
def test_names_beside_curves_do_not_overlap(asked):
    from bench.network.panels import spread

    wanted, heights = map(list, zip(*asked, strict=True))
    places = spread(wanted, heights)
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    for lower, upper in pairwise(order):
        assert places[upper] - places[lower] >= (heights[lower] + heights[upper]) / 2 - 1e-9
    assert max(places) <= 1
    if len(wanted) == 1:
        assert places == wanted
