"""The benchmark of seconds to a loss, without training: its trials, its composition, and its page."""

import math

import pytest

from bench.frontier import compose, timing, trajectories
from bench.frontier.contenders import ALONE, CONTENDERS, DDP
from bench.network.table import Table

WAITING = [each for each in CONTENDERS if not each.free and each.peer != "hivemind"]


def test_a_loss_is_reached_where_straight_lines_between_validations_cross_it():
    curve = [(50, 4.0), (100, 3.0), (150, 3.5), (200, 2.0)]
    assert compose.reached(curve, 4.5) == 50
    assert compose.reached(curve, 3.5) == 75
    assert compose.reached(curve, 2.75) == 175
    assert compose.reached(curve, 1.9) == math.inf
    assert compose.reached([], 1.0) == math.inf
    assert compose.at(curve, 150) == 3.5
    assert compose.at(curve, 151) == math.inf


def losses_of(each, lr, seed, steps):
    """A made course: losses fall as 1/step, faster with a learning rate near 2e-3."""
    fall = 400 / (1 + abs(math.log2(lr / 2e-3))) * (1 + seed / 1000)
    return [(s, 2.0 + fall / (s + len(each.name))) for s in range(50, steps + 1, 50)]


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Tables with made results for every training and every step that is due."""
    trained, timed = Table(tmp_path / "losses.jsonl"), Table(tmp_path / "steps.jsonl")
    for each, ranks, seed, lr, steps in trajectories.due(trained, WAITING, set()):
        asked = trajectories.cell(each, ranks, seed, lr, steps)
        if asked not in trained:
            trained.add(asked, {"losses": losses_of(each, lr, seed, steps), "seconds": 1.0})
    for asked in timing.cells(CONTENDERS, trained):
        step = 0.1 if asked["contender"] == ALONE.name else 1.1 if asked["contender"] == DDP.name else 0.5
        result = {"step": step, "steps": asked.get("steps", 9), "sent": 1e6, "compute": 0.1}
        if "lr" in asked:
            result |= {"losses": [(1, 10.0, 5.0), (9, 90.0, 2.1)], "seconds": 1.02 * step * result["steps"]}
        timed.add(asked, result)
    return trained, timed


def test_seconds_are_steps_to_a_loss_times_seconds_a_step(measured):
    trained, timed = measured
    goals = compose.targets(trained)
    assert goals == sorted(goals, reverse=True)
    for network in timing.NETWORKS:
        rows = {row.contender.name: row for row in compose.rows(trained, timed, network)}
        assert set(rows) == {each.name for each in CONTENDERS}
        ddp, ours = rows["DDP"], rows["bytegrad"]
        assert len(ddp.curves) == len(trajectories.SEEDS)
        assert [ddp.seconds(goal) for goal in goals] == pytest.approx([1.1 * 200, 1.1 * 400, 1.1 * 800])  # its own
        assert ours.seconds(goals[-1]) == 0.5 * ours.steps(goals[-1])
        assert ours.bytes(goals[-1]) == 1e6 * ours.steps(goals[-1])
    here = compose.place(timed, "100 Mb/s")
    assert here.r == pytest.approx(0.1)
    assert here.ceiling == pytest.approx(11.0)
    found = compose.steps_beside_ddp(trained)
    assert len(found) >= trajectories.LEADING / 2 and min(found.values()) > 0
    assert max(found.values()) <= trajectories.LONGEST / trajectories.STEPS
    assert {row[0] for row in compose.checks(trained, timed)} == {name for name, _, _ in timing.REAL}
