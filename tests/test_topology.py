"""The claims of every topology, read off its matrices. No processes."""

from dataclasses import FrozenInstanceError, dataclass
from itertools import permutations
from math import ceil, cos, fsum, log2, pi

import numpy as np
import pytest

from baguakit.topology import (
    Exponential,
    FullyConnected,
    Hypercube,
    OnePeerExponential,
    Ring,
    ShiftOne,
    Topology,
)

EVERY = [FullyConnected(), Ring(), Exponential(), OnePeerExponential(), Hypercube(), ShiftOne()]
SIZES = range(1, 65)
every_topology = pytest.mark.parametrize("topology", EVERY, ids=repr)


def possible_sizes(topology):
    """The sizes of 1 … 64 that the topology accepts; which these are is tested by `test_impossible_sizes`."""
    for size in SIZES:
        try:
            topology.check(size)
        except ValueError:
            continue
        yield size


def matrices(topology, size):
    return [topology.matrix(size, round) for round in range(topology.period(size))]


def product(topology, size, rounds):
    """What is left of a unit vector on each rank after these rounds, the first being applied first."""
    mixing = np.eye(size)
    for round in rounds:
        mixing = topology.matrix(size, round) @ mixing
    return mixing


def distance_from_mean(mixing):
    size = len(mixing)
    return np.linalg.norm(mixing - np.full((size, size), 1 / size), ord=2)


# What every topology promises.


@every_topology
def test_is_doubly_stochastic_for_every_size_and_round(topology):
    for size in possible_sizes(topology):
        assert topology.doubly_stochastic(size)
        for mixing in matrices(topology, size):
            assert (mixing >= 0).all()
            for line in (*mixing, *mixing.T):
                assert abs(fsum(line) - 1) <= 1e-15


@every_topology
def test_claims_are_those_of_its_matrices(topology):
    for size in possible_sizes(topology):
        rounds = matrices(topology, size)
        assert topology.symmetric(size) == all((mixing == mixing.T).all() for mixing in rounds)
        assert topology.static(size) == all((mixing == rounds[0]).all() for mixing in rounds)
        # The closed forms agree with what the base class would have read off the matrices.
        assert topology.symmetric(size) == Topology.symmetric(topology, size)
        assert topology.doubly_stochastic(size) == Topology.doubly_stochastic(topology, size)


@every_topology
def test_period_is_the_smallest_one(topology):
    for size in possible_sizes(topology):
        period = topology.period(size)
        twice = [topology.matrix(size, round) for round in range(2 * period)]
        repeats = [
            shift
            for shift in range(1, period + 1)
            if all((twice[round] == twice[round + shift]).all() for round in range(period))
        ]
        assert repeats == [period]


@every_topology
def test_rows_are_rows_of_the_matrix(topology):
    for size in possible_sizes(topology):
        for round in range(topology.period(size)):
            mixing = topology.matrix(size, round)
            assert mixing.shape == (size, size) and mixing.dtype == np.float64
            for rank in range(size):
                row = topology.weights(rank, size, round)
                assert list(row) == sorted(row)
                assert rank in row
                assert all(type(peer) is int and type(weight) is float for peer, weight in row.items())
                assert row == {peer: mixing[rank, peer] for peer in np.flatnonzero(mixing[rank])}


@every_topology
def test_targets_are_the_others_who_hear(topology):
    for size in possible_sizes(topology):
        for round in range(topology.period(size)):
            mixing = topology.matrix(size, round)
            np.fill_diagonal(mixing, 0)
            for rank in range(size):
                targets = topology.targets(rank, size, round)
                assert all(type(target) is int for target in targets)
                assert targets == tuple(np.flatnonzero(mixing[:, rank]))


@every_topology
@pytest.mark.parametrize("laps", [1, 7, 10**30])
def test_rounds_beyond_the_period_repeat(topology, laps):
    for size in possible_sizes(topology):
        period = topology.period(size)
        for round in range(period):
            later = round + laps * period
            assert topology.weights(0, size, later) == topology.weights(0, size, round)
            assert topology.targets(size - 1, size, later) == topology.targets(size - 1, size, round)


@every_topology
def test_one_rank_hears_itself(topology):
    assert topology.weights(0, 1, 5) == {0: 1.0}
    assert topology.targets(0, 1, 5) == ()
    assert (topology.matrix(1, 5) == np.eye(1)).all()
    assert topology.period(1) == 1
    assert topology.static(1) and topology.symmetric(1) and topology.doubly_stochastic(1)


@every_topology
def test_every_rank_is_reached_within_some_rounds(topology):
    for size in possible_sizes(topology):
        assert (product(topology, size, range(size + topology.period(size))) > 0).all()


@every_topology
def test_is_a_value(topology):
    assert eval(repr(topology)) == topology
    assert hash(eval(repr(topology))) == hash(topology)
    assert [other for other in EVERY if other == topology] == [topology]
    with pytest.raises(FrozenInstanceError):
        topology.size = 4


# What each one is.


def test_two_ranks_meet_halfway_everywhere():
    for topology in EVERY:
        assert topology.weights(0, 2, 0) == topology.weights(1, 2, 3) == {0: 0.5, 1: 0.5}


def test_fully_connected_is_the_mean():
    for size in SIZES:
        assert (FullyConnected().matrix(size, 0) == 1 / size).all()


def test_ring_hears_both_neighbours():
    third = 1 / 3
    assert Ring().weights(0, 5, 0) == {0: third, 1: third, 4: third}
    assert (Ring().matrix(3, 0) == FullyConnected().matrix(3, 0)).all()
    for size in range(4, 65):
        expected = 1 / 3 + 2 / 3 * cos(2 * pi / size)
        assert distance_from_mean(Ring().matrix(size, 0)) == pytest.approx(expected, abs=1e-12)


def test_exponential_hears_powers_of_two_back():
    quarter = 1 / 4
    assert Exponential().weights(5, 8, 0) == {1: quarter, 3: quarter, 4: quarter, 5: quarter}
    assert Exponential().targets(5, 8, 0) == (1, 6, 7)
    for size in range(2, 65):
        contraction = distance_from_mean(Exponential().matrix(size, 0))
        bound = 1 - 2 / (1 + ceil(log2(size)))
        # The theorem of Ying et al.: equal for even n, below for odd.
        assert contraction == pytest.approx(bound, abs=1e-12) if size % 2 == 0 else contraction < bound


def test_one_peer_exponential_doubles_its_distance():
    def heard(round):
        (peer,) = OnePeerExponential().weights(0, 6, round).keys() - {0}
        return peer

    assert [heard(round) for round in range(6)] == [5, 4, 2, 5, 4, 2]


def test_hypercube_flips_one_bit():
    assert [Hypercube().targets(5, 8, round) for round in range(4)] == [(4,), (7,), (1,), (4,)]


def test_shift_one_follows_its_schedule():
    def peers(size, round):
        return [peer for rank in range(size) for peer in ShiftOne().targets(rank, size, round)]

    assert [peers(4, round) for round in range(3)] == [[2, 3, 0, 1], [3, 2, 1, 0], [2, 3, 0, 1]]
    assert peers(8, 0) == [4, 5, 6, 7, 0, 1, 2, 3]
    assert peers(8, 1) == [5, 6, 7, 4, 3, 0, 1, 2]
    assert peers(8, 2) == [6, 7, 4, 5, 2, 3, 0, 1]
    assert peers(8, 3) == [7, 4, 5, 6, 1, 2, 3, 0]


@pytest.mark.parametrize("topology", [ShiftOne(), Hypercube()], ids=repr)
def test_pairs_are_mutual(topology):
    for size in possible_sizes(topology):
        if size == 1:
            continue
        for round in range(topology.period(size)):
            for rank in range(size):
                (peer,) = topology.targets(rank, size, round)
                assert peer != rank
                assert topology.targets(peer, size, round) == (rank,)
                assert topology.weights(rank, size, round) == topology.weights(peer, size, round)


def test_shift_one_lets_every_lower_rank_meet_every_upper_one():
    for size in range(2, 65, 2):
        for rank in range(size // 2):
            met = {ShiftOne().targets(rank, size, round) for round in range(size // 2)}
            assert met == {(peer,) for peer in range(size // 2, size)}


# How soon the mean is reached.


@pytest.mark.parametrize("topology", [OnePeerExponential(), Hypercube()], ids=repr)
@pytest.mark.parametrize("exponent", range(7))
def test_exact_mean_after_log2_rounds_from_any_start(topology, exponent):
    size = 2**exponent
    for start in range(2 * topology.period(size)):
        # Halves of halves are exact in binary: equal, not close.
        assert (product(topology, size, range(start, start + exponent)) == 1 / size).all()


@pytest.mark.parametrize("topology", [OnePeerExponential(), Hypercube()], ids=repr)
def test_exact_mean_in_any_order_of_distinct_rounds(topology):
    for size in (4, 8, 16):
        for order in permutations(range(topology.period(size))):
            assert (product(topology, size, order) == 1 / size).all()


def test_fewer_rounds_are_never_exact():
    for topology in (OnePeerExponential(), Hypercube()):
        for exponent in range(1, 7):
            size = 2**exponent
            assert distance_from_mean(product(topology, size, range(exponent - 1))) >= 2 / pi


def test_one_peer_exponential_is_not_exact_elsewhere():
    for size in (3, 5, 6, 7, 12):
        assert (product(OnePeerExponential(), size, range(20)) != 1 / size).any()
        assert distance_from_mean(product(OnePeerExponential(), size, range(200))) < 1e-12


def test_shift_one_contracts_as_documented():
    for size, left in {4: 0.0, 8: 0.35, 16: 0.57}.items():
        cycle = product(ShiftOne(), size, range(size // 2))
        assert distance_from_mean(cycle) == pytest.approx(left, abs=5e-3)


# What is refused, and in which words.


@every_topology
def test_impossible_sizes(topology):
    needs = {"ShiftOne": lambda n: n == 1 or n % 2 == 0, "Hypercube": lambda n: n & (n - 1) == 0}
    possible = needs.get(type(topology).__name__, lambda n: True)
    assert list(possible_sizes(topology)) == [size for size in SIZES if possible(size)]


def test_shift_one_on_an_odd_group():
    with pytest.raises(ValueError) as caught:
        ShiftOne().check(7)
    assert str(caught.value) == "ShiftOne pairs ranks off and this group has 7; use OnePeerExponential() or Ring()"


def test_hypercube_needs_a_power_of_two():
    with pytest.raises(ValueError, match=r"this group has 6, which is no power of two; use OnePeerExponential\(\) or"):
        Hypercube().check(6)


@pytest.mark.parametrize("topology, size", [(ShiftOne(), 5), (Hypercube(), 12), (Ring(), 0), (Exponential(), -3)])
def test_every_question_checks_the_size(topology, size):
    questions = [
        topology.check,
        topology.period,
        topology.static,
        topology.symmetric,
        topology.doubly_stochastic,
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
            with pytest.raises(ValueError, match=rf"rank {rank} is not in a group of 4; its ranks are 0 to 3"):
                ask(rank, 4, 0)
        with pytest.raises(ValueError, match="rounds count from 0 and this one is -1"):
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


def test_a_topology_without_links_cannot_be_made():
    with pytest.raises(TypeError, match="links"):
        Topology()
