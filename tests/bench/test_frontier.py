"""The benchmark of seconds to a loss, without training: how it reads a curve of losses."""

import math

from baguakit.compare import compose
from bench.elastic.crew import Trainee
from bench.elastic.unequal import counted
from bench.frontier import timing
from bench.frontier.contenders import contender
from bench.network.table import Table


def test_a_loss_is_reached_where_straight_lines_between_validations_cross_it():
    curve = [(50, 4.0), (100, 3.0), (150, 3.5), (200, 2.0)]
    assert compose.reached(curve, 4.5) == 50
    assert compose.reached(curve, 3.5) == 75
    assert compose.reached(curve, 2.75) == 175
    assert compose.reached(curve, 1.9) == math.inf
    assert compose.reached([], 1.0) == math.inf
    assert compose.at(curve, 150) == 3.5
    assert compose.at(curve, 151) == 2.0 and compose.at(curve, 201) == math.inf


def test_steps_count_that_were_contributed_while_a_host_was_present():
    """The first host made 10 steps before; it was killed after 6 more, of which 2 waited; the next made 3."""
    lost, new, slow = Trainee(0, None, None, began=0.0, ended=16.0, waiting=2), Trainee(0, None, None), Trainee(1, 0, 0)
    lost.steps, new.steps, slow.steps = ([(float(t), t, 2) for t in range(n)] for n in (16, 3, 5))
    new.began, slow.waiting = 17.0, 1
    assert counted([lost, new, slow], {id(lost): 10, id(slow): 2}, 10.0, 20.0, [1.0, 2.0]) == (4 + 3 + 2, 6 + 3 + 5)


def test_rates_of_contenders_that_do_not_wait_are_tried_like_all_others(tmp_path):
    """Twice the best rate so far and half of it, while they have not been tried; then all is trained."""
    table, gossip, found = Table(tmp_path / "some.jsonl"), contender("async_gossip"), []
    while len(asked := timing.free_cells([gossip], table)) == 1:
        found.append(asked[0]["lr"] / timing.MADE.lr)
        assert asked[0]["steps"] == timing.MADE.tried and asked[0]["hosts"] == 4 and asked[0]["rate"] == "100mbit"
        table.add(asked[0], {"losses": [(1, 2.0, abs(found[-1] - 2))]})
    assert found == [1, 2, 4]
    assert {cell["lr"] for cell in asked} == {2 * timing.MADE.lr} and {cell["hosts"] for cell in asked} == {4, 8}
    assert timing.free_cells([contender("bytegrad")], table) == []
