"""The benchmark of seconds to a loss, without training: how it reads a curve of losses."""

import math

from baguakit.compare import compose
from bench.elastic.crew import Trainee
from bench.elastic.unequal import counted


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
