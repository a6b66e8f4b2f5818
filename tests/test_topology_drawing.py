"""Topologies draw themselves. What cannot be tested here is whether it looks well."""

import math
import subprocess
import sys

import pytest
from test_topology import EVERY
from tiers import slow_unless

from baguakit.topology import (
    BaseK,
    Exponential,
    FromMatrix,
    Grid2D,
    OnePeerExponential,
    RandomMatching,
    Ring,
    ShiftOne,
)

matplotlib = pytest.importorskip("matplotlib")


def titles(figure):
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


@pytest.mark.parametrize("topology", slow_unless((BaseK(1), Ring()), EVERY), ids=repr)
@pytest.mark.parametrize("size", [1, 4])
def test_every_topology_draws_itself(topology, size):
    figure = topology.draw(size)
    assert isinstance(figure, matplotlib.figure.Figure)
    assert repr(topology) in figure.get_suptitle()
    assert f"on {size} rank" in figure.get_suptitle()
    rounds = min(topology.period(size), 8)
    assert len(titles(figure)) == (rounds if rounds > 1 else 0)
    pictures = [image.get_array() for axes in figure.axes for image in axes.images]
    assert len(pictures) == rounds
    for round, picture in enumerate(pictures):
        assert (picture == topology.matrix(size, round)).all()


def test_weights_are_written_as_fractions():
    def texts(topology, size):
        return {text.get_text() for axes in topology.draw(size).axes if axes.images for text in axes.texts}

    assert texts(Ring(), 5) == {"1/3"}
    assert texts(BaseK(1), 5) == {"1/2", "1", "1/5", "4/5"}
    assert texts(FromMatrix([[0.123, 0.877], [0.877, 0.123]]), 2) == {"0.12", "0.88"}


def test_one_line_for_each_link_and_arrows_where_it_is_one_way():
    from matplotlib.collections import LineCollection
    from matplotlib.patches import FancyArrowPatch

    def links(topology, size):
        graph = topology.draw(size).axes[0]
        lines = sum(len(each.get_segments()) for each in graph.collections if isinstance(each, LineCollection))
        return lines, sum(isinstance(patch, FancyArrowPatch) for patch in graph.patches)

    assert links(Ring(), 6) == (6, 0)
    assert links(OnePeerExponential(), 6) == (0, 6)
    assert links(Exponential(), 8) == (4, 16)  # 4 places back is 4 places ahead
    assert links(Grid2D(), 6) == (7, 0)


def test_as_many_rounds_as_are_asked_for():
    assert titles(RandomMatching().draw(6, rounds=3)) == ["round 0", "round 1", "round 2"]
    figure = ShiftOne().draw(18)
    assert len(titles(figure)) == 8 and "first 8 rounds of 9" in figure.get_suptitle()
    assert "repeats after 3 rounds · exact after 3" in OnePeerExponential().draw(8).get_suptitle()
    with pytest.raises(ValueError, match="rounds is a whole number, 1 to 256, not 0"):
        Ring().draw(4, rounds=0)
    with pytest.raises(ValueError, match="ShiftOne needs an even number of ranks"):
        ShiftOne().draw(5)


def test_ranks_do_not_cover_each_other():
    from matplotlib.patches import Circle

    for size in (2, 8, 64):
        circles = [patch for patch in Ring().draw(size).axes[0].patches if isinstance(patch, Circle)]
        places = sorted(tuple(each.center) for each in circles)
        apart = min(math.dist(a, b) for a in places for b in places if a != b)
        assert len(set(places)) == size and apart > 2 * circles[0].radius


@pytest.mark.slow  # a process imports matplotlib; see tests/pictures
def test_matplotlib_is_imported_to_draw_and_pyplot_never():
    program = (
        "import sys, baguakit as bk\n"
        "ring = bk.topology.Ring()\n"
        "assert 'matplotlib' not in sys.modules and 'networkx' not in vars(bk.topology)\n"
        "ring.draw(4)\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
