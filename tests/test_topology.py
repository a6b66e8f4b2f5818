"""The claims of every topology, read off its matrices. No processes."""

import inspect
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from baguakit import topology as package
from baguakit.topology import BaseK, RandomMatching, ShiftOne, SymmetricExponential, Topology


def built_without_arguments():
    """Yield every exported topology that needs no arguments, but `Chosen`: test_topology_chosen.py."""
    for kind in (getattr(package, name) for name in package.__all__ if name != "Chosen"):
        arguments = inspect.signature(kind).parameters.values()
        if not inspect.isabstract(kind) and all(each.default is not each.empty for each in arguments):
            yield kind()


EVERY = [
    *built_without_arguments(),
    SymmetricExponential(base=2),
    BaseK(1),
    BaseK(2),
    BaseK(3),
    RandomMatching(seed=7),
]
PERIODIC = [topology for topology in EVERY if not isinstance(topology, RandomMatching)]
SIZES = range(1, 65)
every_topology = pytest.mark.parametrize("topology", EVERY, ids=repr)


def possible_sizes(topology, sizes=SIZES):
    """The sizes of these that the topology accepts; which these are is tested by `test_impossible_sizes`."""
    for size in sizes:
        try:
            topology.check(size)
        except ValueError:
            continue
        yield size


@cache
def matrices(topology, size):
    """The matrices of one period, or of the first rounds of a long one, made once for all tests."""
    made = [topology.matrix(size, round) for round in range(min(topology.period(size), 64))]
    for mixing in made:
        mixing.flags.writeable = False
    return made


def product(topology, size, rounds):
    """Return the product of the matrices of these rounds; the first is applied first."""
    mixing = np.eye(size)
    for round in rounds:
        mixing = topology.matrix(size, round) @ mixing
    return mixing


def distance_from_mean(mixing):
    size = len(mixing)
    return np.linalg.norm(mixing - np.full((size, size), 1 / size), ord=2)


# Properties of every topology: its checks are in test_parts.py.


@every_topology
def test_is_doubly_stochastic_for_every_size(topology):
    assert all(map(topology.doubly_stochastic, possible_sizes(topology)))


@every_topology
def test_one_rank_hears_itself(topology):
    assert topology.weights(0, 1, 5) == {0: 1.0}
    assert topology.targets(0, 1, 5) == ()
    assert (topology.matrix(1, 5) == np.eye(1)).all()
    assert topology.period(1) == 1
    assert topology.static(1) and topology.symmetric(1) and topology.doubly_stochastic(1)
    assert topology.rounds_to_exactness(1) == 0 and topology.spectral_gap(1) == 1


# Refusals, and their words.


@every_topology
def test_impossible_sizes(topology):
    needs = {"ShiftOne": lambda n: n == 1 or n % 2 == 0}
    possible = needs.get(type(topology).__name__, lambda n: True)
    assert list(possible_sizes(topology)) == [size for size in SIZES if possible(size)]


def test_shift_one_on_an_odd_group():
    with pytest.raises(ValueError) as caught:
        ShiftOne().check(7)
    assert (
        str(caught.value)
        == "ShiftOne needs an even number of ranks and this group has 7; use OnePeerExponential() or BaseK(1)"
    )


@pytest.mark.parametrize(
    "topology, size",
    [
        (ShiftOne(), 5),
        *((topology, size) for topology in EVERY for size in (0, -3)),
    ],
    ids=repr,
)
def test_every_question_checks_the_size(topology, size):
    questions = [
        topology.check,
        topology.period,
        topology.static,
        topology.symmetric,
        topology.doubly_stochastic,
        topology.rounds_to_exactness,
        topology.spectral_gap,
        lambda size: topology.weights(0, size, 0),
        lambda size: topology.targets(0, size, 0),
        lambda size: topology.matrix(size, 0),
    ]
    for ask in questions:
        with pytest.raises(ValueError, match=rf"(has {size}\b|not {size}$)"):
            ask(size)


@every_topology
def test_ranks_and_rounds_that_do_not_exist(topology):
    for ask in (topology.weights, topology.targets):
        for rank in (-1, 4):
            with pytest.raises(ValueError, match=rf"rank is a whole number, 0 to 3, not {rank}"):
                ask(rank, 4, 0)
        with pytest.raises(ValueError, match="round is a whole number, 0 or more, not -1"):
            ask(0, 4, -1)


# A topology of one's own: `links` is enough.


@dataclass(frozen=True)
class Leaders(Topology):
    """Everyone hears rank 0, in even rounds only: not symmetric, not doubly stochastic."""

    def links(self, rank, size, round):
        return [(rank, 0.5), (0 if round % 2 == 0 else rank, 0.5)]

    def period(self, size):
        return 2


def test_the_base_class_reads_the_answers_off_the_matrices():
    leaders = Leaders()
    assert leaders.weights(0, 3, 0) == {0: 1.0}  # met twice, counted twice
    assert leaders.weights(2, 3, 0) == {0: 0.5, 2: 0.5}
    assert leaders.targets(0, 3, 0) == (1, 2)
    assert leaders.targets(1, 3, 0) == leaders.targets(0, 3, 1) == ()
    assert not leaders.symmetric(3)
    assert not leaders.doubly_stochastic(3)
    assert not leaders.static(3)
    assert leaders.rounds_to_exactness(3) is None
    with pytest.raises(ValueError, match=r"Leaders\(\) is not doubly stochastic for 3 ranks"):
        leaders.spectral_gap(3)


def test_a_topology_without_links_cannot_be_made():
    with pytest.raises(TypeError, match="links"):
        Topology()
