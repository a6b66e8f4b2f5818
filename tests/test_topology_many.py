"""Topologies cost a rank its neighbours, not all ranks: the same Python calls among 16,384 ranks as among few."""

import pytest
from test_topology import EVERY, matrices, possible_sizes
from tiers import slow_unless

from baguakit.costs import degree
from baguakit.primitives.neighbors import is_mean
from baguakit.topology import (
    BaseK,
    FromGraph,
    FromMatrix,
    FullyConnected,
    Grid2D,
    OnePeerExponential,
    RandomMatching,
    Ring,
    ShiftOne,
    Star,
)
from bench.scaling.many.calls import python_calls

FEW, MANY = 1 << 4, 1 << 14
EXCEPTIONS = {
    FullyConnected(): "hears all ranks",
    Star(): "its rank 0 hears all ranks",
}  # and `FromMatrix`, whose row of n weights is searched for those that are not 0
A_FEW_NEIGHBORS = ("Ring", "Grid2D", "OnePeerExponential", "ShiftOne", "OnePeerExact", "RandomMatching")
FAST = OnePeerExponential(), BaseK(1)
NEIGHBORLY = slow_unless(FAST, [each for each in EVERY if each not in EXCEPTIONS])
every = pytest.mark.parametrize("topology", NEIGHBORLY, ids=repr)


def calls_of_an_exchange(topology, size, round=1):
    """Return the calls for what a rank asks of a topology in one round, once it has asked for this number of ranks."""
    rank = size // 2 + 1

    def ask():
        topology.period(size)
        topology.weights(rank, size, round)
        topology.targets(rank, size, round)

    ask()
    return python_calls(ask)


@every
def test_a_round_costs_no_more_calls_than_its_neighbours(topology):
    few, many = (calls_of_an_exchange(topology, size) for size in (FEW, MANY))
    if type(topology).__name__ in A_FEW_NEIGHBORS:
        assert many == few
    assert many <= few * 14 / 4  # log₂ of the numbers of ranks


@pytest.mark.parametrize("topology", slow_unless(FAST, EVERY), ids=repr)
def test_the_checks_of_attach_are_declared(topology):
    """They need no matrix: no more calls for many ranks, and no n × n memory."""

    def ask(size):
        topology.check(size)
        assert topology.doubly_stochastic(size) and topology.column_stochastic(size)
        return topology.symmetric(size), topology.static(size)

    for size in (FEW, MANY):
        ask(size)
    assert python_calls(lambda: ask(MANY)) == python_calls(lambda: ask(FEW))


@pytest.mark.parametrize("topology", [*EVERY, FromMatrix([[0.5, 0.5], [0.5, 0.5]]), FromGraph([(0, 1)])], ids=repr)
def test_a_declared_circulant_is_one_and_the_exact_mean_is_recognised(topology):
    for size in possible_sizes(topology, range(1, 13)):
        for round, mixing in enumerate(matrices(topology, size)):
            if "circulant" in topology.facts:
                for rank, row in enumerate(mixing):
                    assert all(row[(rank + i) % size] == mixing[0, i] for i in range(size))
            assert is_mean(topology, size, round) == (mixing == 1 / size).all()
            neighbors = (mixing != 0).sum(axis=1), (mixing != 0).sum(axis=0)
            assert degree(topology, size, round) == max(map(max, neighbors)) - 1


def test_costs_of_many_ranks_are_known_at_once():
    for topology in (Ring(), OnePeerExponential()):
        few, many = (python_calls(lambda t=topology, n=n: degree.__wrapped__(t, n, 0)) for n in (FEW, MANY))
        assert many == few
    assert [degree(each, 64) for each in (RandomMatching(), ShiftOne(), BaseK(3), Grid2D())] == [1, 1, 3, 4]


def test_the_plan_of_a_base_graph_takes_a_few_steps_for_any_number_of_ranks():
    from baguakit.topology import rounds

    for k, size in ((1, 1 << 20), (3, 1 << 20), (1, 10_007), (3, 16_383)):
        rounds._fewest.cache_clear()
        assert python_calls(lambda k=k, size=size: BaseK(k).period(size)) < 20_000
