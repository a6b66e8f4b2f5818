"""The benchmark of seconds to a loss, without training: how it reads a curve of losses."""

import math

from baguakit.compare import compose


def test_a_loss_is_reached_where_straight_lines_between_validations_cross_it():
    curve = [(50, 4.0), (100, 3.0), (150, 3.5), (200, 2.0)]
    assert compose.reached(curve, 4.5) == 50
    assert compose.reached(curve, 3.5) == 75
    assert compose.reached(curve, 2.75) == 175
    assert compose.reached(curve, 1.9) == math.inf
    assert compose.reached([], 1.0) == math.inf
    assert compose.at(curve, 150) == 3.5
    assert compose.at(curve, 151) == 2.0 and compose.at(curve, 201) == math.inf
