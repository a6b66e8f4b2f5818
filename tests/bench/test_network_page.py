"""The page of networks shows whoever has been measured, installed here or not."""

import pytest

from bench.network import page, steps
from bench.network.contenders import ALONE
from bench.network.reports import of_steps
from bench.network.table import Table

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


def test_rows_of_strangers_are_told_behind_the_others(table, tmp_path):
    lines = of_steps(table).splitlines()[1:]
    assert [next(name for name in NAMES if f" {name} " in line) for line in lines] == NAMES * 4
    assert all(" 300.000 " in line and " 1.33 " in line for line in lines[3::4])  # 0.4 s of DDP to 0.3 s
    text = page.write(tmp_path, tmp_path / "README.md").read_text()
    assert all(line in text for line in lines)


@pytest.mark.parametrize("name", ["by_bandwidth", "by_hosts", "by_time"])
def test_lines_of_strangers_are_drawn_alike_in_all_figures(table, name):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from bench.network import figures

    figure, cells = Figure(), figures.longest(table)
    assert getattr(figures, name)(figure, cells)
    axes = figure.axes[0]
    assert axes.get_legend_handles_labels()[1] == (NAMES if name == "by_bandwidth" else NAMES[1:])
    (line,) = [line for line in axes.lines if line.get_label() == STRANGER]
    styles = figures.styles(cells)
    assert (line.get_color(), line.get_linestyle()) == (styles[STRANGER]["color"], styles[STRANGER]["linestyle"])
    assert sum(style == styles[STRANGER] for style in styles.values()) == 1


def test_marks_of_strangers_are_drawn_below_the_others(table):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    from bench.network import figures

    figure = Figure()
    assert figures.with_straggler(figure, figures.longest(table))
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == NAMES[1:]
    marks, _ = axes.lines  # and the line of those that nobody slows
    assert list(marks.get_ydata()) == [0, 1, 2] and axes.yaxis_inverted()
    assert list(marks.get_xdata()) == pytest.approx([0.1 / SPEED[name] for name in NAMES[1:]])
