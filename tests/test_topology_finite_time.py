"""The exact mean in finite time for every number of ranks. No processes."""

from math import log

import numpy as np
import pytest
from test_topology import product

from baguakit.topology import BaseK, Hypercube, OnePeerExact, OnePeerExponential

SIZES = [*range(2, 34), 48, 64, 100, 127, 128]
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
    for size in SIZES:
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
    for size in SIZES:
        for round in range(BaseK(k).period(size)):
            assert max(len(BaseK(k).targets(rank, size, round)) for rank in range(size)) <= k


def test_base_k_is_everyone_where_k_allows_it():
    for k, size in ((1, 2), (2, 3), (3, 4), (7, 8), (9, 6)):
        assert BaseK(k).static(size)
        assert (BaseK(k).matrix(size, 0) == 1 / size).all()


def test_base_1_is_the_hypercube_for_powers_of_two():
    for size in (2, 4, 8, 16, 64):
        for round in range(Hypercube().period(size)):
            assert (BaseK(1).matrix(size, round) == Hypercube().matrix(size, round)).all()


def test_base_k_takes_a_whole_number():
    assert repr(BaseK(2)) == "BaseK(2)"
    for k in (0, -1, 1.5, None):
        with pytest.raises((ValueError, TypeError), match=rf"k is a whole number, 1 or more, not {k}"):
            BaseK(k)


def test_one_peer_exact_is_what_the_size_asks_for():
    for size in range(1, 65):
        chosen = OnePeerExponential() if size & (size - 1) == 0 else BaseK(1)
        assert OnePeerExact().period(size) == chosen.period(size)
        for round in range(chosen.period(size)):
            assert (OnePeerExact().matrix(size, round) == chosen.matrix(size, round)).all()
            assert all(len(OnePeerExact().targets(rank, size, round)) <= 1 for rank in range(size))
        assert np.abs(product(OnePeerExact(), size, range(chosen.period(size))) - 1 / size).max() <= 1e-15
