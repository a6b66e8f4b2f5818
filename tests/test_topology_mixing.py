"""The definition of each topology, how fast it mixes, and the exact mean in finite time. No processes."""

from itertools import permutations
from math import ceil, cos, log, log2, pi

import numpy as np
import pytest
from test_topology import PERIODIC, SIZES, distance_from_mean, possible_sizes, product
from tiers import slow_unless

from baguakit.topology import (
    BaseK,
    Exponential,
    FullyConnected,
    Grid2D,
    OnePeerExact,
    OnePeerExponential,
    RandomMatching,
    Ring,
    ShiftOne,
    Star,
    SymmetricExponential,
    Topology,
)

# The matrix of each one.


def test_two_ranks_meet_halfway_everywhere():
    for topology in (*PERIODIC, RandomMatching()):
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


def test_symmetric_exponential_hears_powers_on_both_sides():
    assert set(SymmetricExponential().weights(0, 17, 0)) == {0, 1, 4, 13, 16}
    assert set(SymmetricExponential(base=2).weights(0, 8, 0)) == {0, 1, 2, 4, 6, 7}
    assert set(SymmetricExponential(base=3).weights(0, 8, 0)) == {0, 1, 3, 5, 7}
    with pytest.raises(ValueError, match="base is a whole number, 2 or more, not 1"):
        SymmetricExponential(base=1)


def test_star_is_heard_and_hears_through_its_centre():
    assert Star().weights(0, 4, 0) == {0: 1 / 4, 1: 1 / 4, 2: 1 / 4, 3: 1 / 4}
    assert Star().weights(2, 4, 0) == {0: 1 / 4, 2: 3 / 4}
    assert Star().targets(2, 4, 0) == (0,)


def test_grid_is_as_square_as_it_can_be():
    shapes = {2: (1, 2), 4: (2, 2), 6: (2, 3), 7: (1, 7), 12: (3, 4), 16: (4, 4), 48: (6, 8)}
    for size, (rows, columns) in shapes.items():
        assert Grid2D().targets(0, size, 0) == tuple(sorted({1} | ({columns} if rows > 1 else set())))
        last = size - 1
        assert Grid2D().targets(last, size, 0) == tuple(sorted({last - 1} | ({last - columns} if rows > 1 else set())))


def test_grid_has_metropolis_weights():
    quarter, fifth = 1 / 4, 1 / 5
    assert Grid2D().weights(0, 9, 0) == {0: 1 / 2, 1: quarter, 3: quarter}
    assert Grid2D().weights(4, 9, 0) == {1: fifth, 3: fifth, 4: fifth, 5: fifth, 7: fifth}
    assert Grid2D().weights(3, 4, 0) == {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}


def test_one_peer_exponential_doubles_its_distance():
    def heard(round):
        (peer,) = OnePeerExponential().weights(0, 6, round).keys() - {0}
        return peer

    assert [heard(round) for round in range(6)] == [5, 4, 2, 5, 4, 2]


def test_shift_one_follows_its_schedule():
    def peers(size, round):
        return [peer for rank in range(size) for peer in ShiftOne().targets(rank, size, round)]

    assert [peers(4, round) for round in range(3)] == [[2, 3, 0, 1], [3, 2, 1, 0], [2, 3, 0, 1]]
    assert peers(8, 0) == [4, 5, 6, 7, 0, 1, 2, 3]
    assert peers(8, 1) == [5, 6, 7, 4, 3, 0, 1, 2]
    assert peers(8, 2) == [6, 7, 4, 5, 2, 3, 0, 1]
    assert peers(8, 3) == [7, 4, 5, 6, 1, 2, 3, 0]


def test_shift_one_lets_every_lower_rank_meet_every_upper_one():
    for size in range(2, 65, 2):
        for rank in range(size // 2):
            met = {ShiftOne().targets(rank, size, round) for round in range(size // 2)}
            assert met == {(peer,) for peer in range(size // 2, size)}


# How soon the mean is reached.


@pytest.mark.parametrize("topology", [OnePeerExponential(), BaseK(1)], ids=repr)
def test_exact_mean_in_any_order_of_distinct_rounds(topology):
    for size in (4, 8, 16):
        for order in permutations(range(topology.period(size))):
            assert (product(topology, size, order) == 1 / size).all()


def test_shift_one_contracts_as_documented():
    for size, left in {4: 0.0, 8: 0.35, 16: 0.57}.items():
        cycle = product(ShiftOne(), size, range(size // 2))
        assert distance_from_mean(cycle) == pytest.approx(left, abs=5e-3)


@pytest.mark.parametrize("topology", PERIODIC, ids=repr)
def test_spectral_gap_is_what_a_period_leaves(topology):
    for size in (2, 3, 4, 5, 8, 12, 17, 30):
        if size in possible_sizes(topology):
            gap, period = topology.spectral_gap(size), topology.period(size)
            left = distance_from_mean(product(topology, size, range(period)))
            assert (1 - gap) ** period == pytest.approx(left, abs=1e-14)
            assert (gap == 1) == (topology.rounds_to_exactness(size) in range(period + 1))


@pytest.mark.parametrize("topology", slow_unless((OnePeerExponential(), BaseK(3)), PERIODIC), ids=repr)
def test_rounds_to_exactness_are_those_after_which_the_product_is_the_mean(topology):
    for size in possible_sizes(topology):
        rounds = topology.rounds_to_exactness(size)
        # The base class looks for them among the products, and here agrees with every closed form.
        assert rounds == Topology.rounds_to_exactness(topology, size)
        if rounds is None:
            assert distance_from_mean(product(topology, size, range(3))) > 1e-6
        else:
            assert distance_from_mean(product(topology, size, range(rounds))) <= 1e-13


# Random matchings.


@pytest.mark.parametrize("size", [3, 4, 7, 8, 33, 64])
def test_a_random_matching_pairs_everyone_but_the_odd_one_out(size):
    for round in range(20):
        targets = [RandomMatching(seed=5).targets(rank, size, round) for rank in range(size)]
        assert [heard for heard in targets if not heard] == [()] * (size % 2)
        for rank, heard in enumerate(targets):
            assert all(targets[peer] == (rank,) and peer != rank for peer in heard)
            weights = RandomMatching(seed=5).weights(rank, size, round)
            assert weights == ({rank: 0.5, heard[0]: 0.5} if heard else {rank: 1.0})
        permutation = 2 * RandomMatching(seed=5).matrix(size, round) - np.eye(size)
        assert (permutation @ permutation == np.eye(size)).all()


def test_random_matchings_differ_by_seed_and_round_and_by_nothing_else():
    def peers(seed, round):
        return tuple(RandomMatching(seed).targets(rank, 16, round) for rank in range(16))

    drawn = {peers(seed, round) for seed in (-1, 0, 1, 2**60) for round in range(50)}
    assert len(drawn) == 200
    assert peers(3, 11) == peers(3, 11) == peers(3, 11 + 2**64)
    # Fixed for ever: checkpoints resume in the middle, and ranks may run other versions of Python.
    assert [RandomMatching().targets(0, 8, round) for round in range(6)] == [(6,), (7,), (7,), (2,), (5,), (1,)]


@pytest.mark.parametrize("size", [3, 4, 8, 9, 32])
def test_random_matchings_halve_the_squared_distance(size):
    expected = 1 / 2 if size % 2 else (size - 2) / (2 * (size - 1))
    x = np.random.default_rng(0).standard_normal((size, 200))
    x -= x.mean(axis=0)
    left = [((RandomMatching().matrix(size, round) @ x) ** 2).sum() / (x**2).sum() for round in range(1000)]
    assert np.mean(left) == pytest.approx(expected, abs=4.5 * np.std(left) / 1000**0.5 + 1e-12)
    assert 1 - RandomMatching().spectral_gap(size) == pytest.approx(expected**0.5)


def test_random_matchings_promise_no_exactness():
    assert [RandomMatching().rounds_to_exactness(size) for size in (1, 2, 3, 4)] == [0, 1, None, None]
    with pytest.raises(TypeError, match=r"a whole number, not 0\.5"):
        RandomMatching(0.5)


FINITE = [*range(2, 34), 48, 64, 100, 127, 128]
every_k = pytest.mark.parametrize("k", [1, 2, 3])
# The rounds of the Base-(k+1) graph of Takezawa et al., which BaseK may not exceed.
PAPER = {
    1: {2: 1, 3: 3, 4: 2, 5: 5, 6: 4, 7: 5, 8: 3, 9: 7, 10: 6, 12: 5, 15: 7, 16: 4, 17: 9, 20: 7, 24: 6, 25: 9, 31: 9}
    | {32: 5, 48: 7, 64: 6, 100: 11, 128: 7},
    2: {3: 1, 100: 8, 128: 7},
    3: {16: 2, 64: 3, 128: 4, 100: 6},
}


@every_k
def test_base_k_is_exact_in_floating_point(k):
    for size in FINITE:
        rounds = BaseK(k).rounds_to_exactness(size)
        assert rounds == BaseK(k).period(size)
        for start in (0, 3 * rounds):
            reached = product(BaseK(k), size, range(start, start + rounds))
            assert np.abs(reached - 1 / size).max() <= 1e-15
        assert np.abs(product(BaseK(k), size, range(rounds - 1)) - 1 / size).max() > 1e-3


@every_k
def test_base_k_takes_no_more_rounds_than_the_paper(k):
    for size, rounds in PAPER[k].items():
        assert BaseK(k).rounds_to_exactness(size) <= rounds
    for size in range(2, 1100):
        assert BaseK(k).rounds_to_exactness(size) <= 2 * log(size, k + 1) + 2


@every_k
def test_base_k_meets_at_most_k_others(k):
    for size in FINITE:
        for round in range(BaseK(k).period(size)):
            assert max(len(BaseK(k).targets(rank, size, round)) for rank in range(size)) <= k


def test_base_1_is_the_hypercube_for_powers_of_two():
    for size in (2, 4, 8, 16, 64):
        assert BaseK(1).period(size) == size.bit_length() - 1
        for round in range(BaseK(1).period(size)):
            assert all(BaseK(1).targets(rank, size, round) == (rank ^ 1 << round,) for rank in range(size))


def test_base_k_takes_a_whole_number():
    assert repr(BaseK(2)) == "BaseK(2)"
    for k in (0, -1, 1.5, None):
        with pytest.raises((ValueError, TypeError), match=rf"k is a whole number, 1 or more, not {k}"):
            BaseK(k)


def test_one_peer_exact_is_what_the_size_asks_for():
    for size in (*range(1, 34), 63, 64):
        chosen = OnePeerExponential() if size & (size - 1) == 0 else BaseK(1)
        assert OnePeerExact().period(size) == chosen.period(size)
        for round in range(chosen.period(size)):
            assert (OnePeerExact().matrix(size, round) == chosen.matrix(size, round)).all()
            assert all(len(OnePeerExact().targets(rank, size, round)) <= 1 for rank in range(size))
        assert np.abs(product(OnePeerExact(), size, range(chosen.period(size))) - 1 / size).max() <= 1e-15
