"""Matrices and graphs of one's own, and weights chosen by each rank: what is kept, and what is refused."""

import pickle
from math import fsum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_topology import distance_from_mean, product

from baguakit.algorithms import choco, diloco, low_precision_decentralized, push_sum
from baguakit.comm import Comm
from baguakit.stages import Hierarchical, NeighborMean
from baguakit.topology import BaseK, Chosen, FromGraph, FromMatrix, Grid2D, OnePeerExponential, Ring, Star
from baguakit.topology.base import has_unit_sums
from baguakit.topology.chosen import as_chosen

HALVES = [[0.5, 0.5, 0], [0, 0.5, 0.5], [0.5, 0, 0.5]]


def random_doubly_stochastic(size, seed):
    """A mean of permutations, a few entries of it."""
    draw = np.random.default_rng(seed)
    weights = draw.dirichlet(np.ones(4))
    return sum(w * np.eye(size)[draw.permutation(size)] for w in weights)


# One matrix, or several.


def test_pairs_may_be_a_tensor_or_an_array():
    pairs = [(0, 1), (1, 2), (2, 0)]
    assert FromGraph(torch.tensor(pairs)) == FromGraph(np.array(pairs)) == FromGraph(pairs)


def test_a_matrix_is_what_it_was():
    topology = FromMatrix(HALVES)
    assert (topology.matrix(3, 0) == HALVES).all()
    assert topology.weights(1, 3, 5) == {1: 0.5, 2: 0.5}
    assert topology.targets(1, 3, 5) == (0,)
    assert topology.static(3) and not topology.symmetric(3) and topology.doubly_stochastic(3)
    assert topology.spectral_gap(3) == pytest.approx(0.5)
    assert topology.rounds_to_exactness(3) is None


@pytest.mark.parametrize("original", [Ring(), BaseK(2), OnePeerExponential(), Star()], ids=repr)
@pytest.mark.parametrize("size", [2, 5, 8])
def test_the_matrices_of_a_topology_are_that_topology(original, size):
    topology = FromMatrix([original.matrix(size, round) for round in range(original.period(size))])
    assert topology.period(size) == original.period(size)
    for round in (0, 1, 2, 3, 10):
        assert (topology.matrix(size, round) == original.matrix(size, round)).all()
        for rank in range(size):
            assert topology.targets(rank, size, round) == original.targets(rank, size, round)
    for ask in ("static", "symmetric", "doubly_stochastic", "rounds_to_exactness", "spectral_gap"):
        assert getattr(topology, ask)(size) == getattr(original, ask)(size)


def test_exactness_after_more_than_one_period():
    shift, late = np.roll(np.eye(4), 1, axis=1), (np.eye(4) + np.roll(np.eye(4), 2, axis=1)) / 2
    nilpotent = FromMatrix((np.eye(4) + shift) / 2 @ shift @ late)
    assert nilpotent.rounds_to_exactness(4) == 1
    # W − J is not zero and its square is.
    wave = np.outer([1, 1, -1, -1], [1, -1, 1, -1]) / 4
    twice = FromMatrix(np.full((4, 4), 1 / 4) + wave)
    assert twice.rounds_to_exactness(4) == 2 and twice.static(4)
    assert distance_from_mean(product(twice, 4, range(2))) == 0


@pytest.mark.parametrize(
    "matrix",
    [HALVES, tuple(map(tuple, HALVES)), np.array(HALVES), torch.tensor(HALVES), np.array(HALVES, dtype=np.float16)],
)
def test_lists_arrays_and_tensors_are_the_same_value(matrix):
    assert FromMatrix(matrix) == FromMatrix([matrix]) == FromMatrix([matrix, matrix]) == FromMatrix(HALVES)


def test_from_matrix_is_a_value():
    one, same, other = FromMatrix(HALVES), FromMatrix(np.array(HALVES)), FromMatrix([HALVES, np.eye(3)])
    assert one == same and hash(one) == hash(same) and one != other
    assert {one: "kept"}[pickle.loads(pickle.dumps(same))] == "kept"
    for topology in (one, other):
        assert eval(repr(topology)) == topology
    assert repr(one) == "FromMatrix([[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.5, 0.0, 0.5]])"


# Rounding is mended, and nothing else.


@pytest.mark.parametrize("size", [2, 3, 7, 16, 64])
def test_single_precision_is_mended(size):
    for seed in range(5):
        exact = random_doubly_stochastic(size, seed)
        for meant in (exact, (exact + exact.T) / 2):
            rounded = meant.astype(np.float32)
            kept = FromMatrix(rounded)
            assert all(abs(fsum(line) - 1) <= 1e-15 for line in (*kept.matrix(size, 0), *kept.matrix(size, 0).T))
            assert np.abs(kept.matrix(size, 0) - meant).max() <= 1e-6
            assert ((kept.matrix(size, 0) == 0) == (meant == 0)).all()
            assert kept.symmetric(size) or not (meant == meant.T).all()


# Refusals.


@pytest.mark.parametrize(
    "matrix, words",
    [
        ([[1, 0.5], [0, 0.5]], r"row 0 of the matrix sums to 1.5, not 1"),
        ([[0.5, 0.5], [1, 0]], r"column 0 of the matrix sums to 1.5, not 1"),
        ([[0.9, 0.1], [0.10002, 0.89998]], r"column 0 of the matrix sums to 1.00002, not 1"),
        ([np.eye(2), np.ones((2, 2))], r"row 0 of the matrix of round 1 sums to 2, not 1"),
        ([[1.5, -0.5], [-0.5, 1.5]], r"the weight -0.5 in row 0, column 1 of the matrix is negative"),
        ([[np.nan, 0.5], [0.5, 0.5]], r"the weight nan in row 0, column 0 of the matrix .* not finite"),
    ],
)
def test_a_matrix_that_is_not_doubly_stochastic(matrix, words):
    with pytest.raises(ValueError, match=words) as caught:
        FromMatrix(matrix)
    # The way out is in the message, and works as it is written.
    way_out = "FromGraph(numpy.argwhere(matrix))"
    assert f"{way_out} gives its graph Metropolis weights, which are doubly stochastic" in str(caught.value)
    if np.ndim(matrix) == 2:
        assert eval(way_out, {"FromGraph": FromGraph, "numpy": np, "matrix": matrix}).doubly_stochastic(2)


def test_the_default_weights_of_a_star_are_refused():
    """Each row uniform over who is heard: the centre would count 2.9-fold among 8."""
    heard = np.eye(8)
    heard[0] = heard[:, 0] = 1
    with pytest.raises(ValueError, match=r"column 0 of the matrix sums to 3\.625"):
        FromMatrix(heard / heard.sum(1, keepdims=True))
    assert (FromGraph(np.argwhere(heard)).matrix(8, 0) == Star().matrix(8, 0)).all()


@pytest.mark.parametrize(
    "matrix, error, words",
    [
        ([[1, 2, 3], [4, 5, 6]], ValueError, "a row and a column for each rank; this one is 2 × 3"),
        ([np.eye(3), np.eye(2)], ValueError, "round 1 is 2 × 2 and that of round 0 3 × 3"),
        (np.ones((0, 0)), ValueError, "this one is 0 × 0"),
        ([1, 2], TypeError, r"takes a square matrix, or a sequence of one for each round, not \[1, 2\]"),
        ("ring", TypeError, "not 'ring'"),
        (3, TypeError, "not 3"),
        ([], TypeError, r"not \[\]"),
        (Ring(), TypeError, r"not Ring\(\)"),
    ],
)
def test_what_is_no_matrix(matrix, error, words):
    with pytest.raises(error, match=words):
        FromMatrix(matrix)


@pytest.mark.parametrize("topology", [FromMatrix(HALVES), FromGraph([(0, 1), (1, 2)])], ids=repr)
def test_groups_of_another_size(topology):
    asks = ("check", "period", "static", "symmetric", "doubly_stochastic", "spectral_gap", "rounds_to_exactness")
    for ask in asks:
        with pytest.raises(ValueError, match=r"was given for 3 ranks and the group has 4"):
            getattr(topology, ask)(4)
    topology.check(1)  # one rank alone is a mean of its own, as everywhere
    assert topology.weights(0, 1, 3) == {0: 1.0} and topology.targets(0, 1, 3) == ()
    assert topology.period(1) == 1 and topology.rounds_to_exactness(1) == 0
    with pytest.raises(ValueError, match="rank is a whole number, 0 to 2, not 3"):
        topology.targets(3, 3, 0)


# Metropolis weights.


@pytest.mark.parametrize("size", [2, 5, 16, 64])
def test_metropolis_weights_of_any_graph_are_doubly_stochastic(size):
    graph = np.random.default_rng(size).random((size, size)) < 0.3
    graph[0] = True  # connected
    assert has_unit_sums(FromGraph(np.argwhere(graph)).matrix(size, 0))


# Graphs.


def test_a_graph_is_its_metropolis_matrix():
    nx = pytest.importorskip("networkx")
    for graph in (nx.petersen_graph(), nx.star_graph(5), nx.path_graph(4), nx.complete_graph(6)):
        size = graph.number_of_nodes()
        linked = nx.to_numpy_array(graph)
        degrees = linked.sum(1) + 1
        expected = linked / np.maximum.outer(degrees, degrees)
        expected += np.diag(1 - expected.sum(1))
        assert np.abs(FromGraph(graph).matrix(size, 0) - expected).max() < 1e-15
        assert FromGraph(graph).symmetric(size) and FromGraph(graph).doubly_stochastic(size)
    assert (FromGraph(nx.complete_graph(6)).matrix(6, 0) == 1 / 6).all()
    assert FromGraph(nx.complete_graph(6)).rounds_to_exactness(6) == 1
    assert (FromGraph(nx.star_graph(7)).matrix(8, 0) == Star().matrix(8, 0)).all()
    grid = FromGraph(nx.grid_2d_graph(3, 4))
    assert (grid.matrix(12, 0) == Grid2D().matrix(12, 0)).all()


def test_a_graph_needs_no_networkx():
    attributes = SimpleNamespace(nodes=["b", "a", "c"], edges=[("a", "b"), ("b", "c")])
    weighted = SimpleNamespace(nodes=["b", "a", "c"], edges=[("a", "b", 0), ("b", "c", 0)])
    assert FromGraph(attributes) == FromGraph(weighted) == FromGraph([(0, 1), (0, 2)])


def test_nodes_get_ranks_in_the_order_of_the_graph():
    assert FromGraph([("c", "a"), ("a", "b")]).rounds[0] == ((0, 1), (1, 2))  # as they appear: c, a, b
    assert FromGraph([(2, 1), (1, 0)]).rounds[0] == ((0, 1), (1, 2))  # 0 … n − 1 are the ranks


def test_from_graph_is_a_value():
    path = FromGraph([(1, 0), (2, 1)])
    assert repr(path) == "FromGraph([(0, 1), (1, 2)])"
    assert eval(repr(path)) == path and hash(eval(repr(path))) == hash(path)
    path.weights(0, 3, 0)
    assert pickle.loads(pickle.dumps(path)) == path
    large = FromGraph([(rank, rank + 1) for rank in range(99)])
    assert repr(large).startswith("FromGraph(<100 ranks, 99 edges, sha256 ")


def test_graphs_that_are_refused():
    nx = pytest.importorskip("networkx")
    with pytest.raises(ValueError, match=r"takes an undirected graph, .* pass graph.to_undirected\(\)"):
        FromGraph(nx.DiGraph([(0, 1)]))
    with pytest.raises(ValueError, match="not connected: there is no path between node 'z' and node 'a'"):
        FromGraph([("a", "b"), ("z", "y")])
    with pytest.raises(ValueError, match="not connected: there is no path between node 2 and node 0"):
        FromGraph(SimpleNamespace(nodes=range(3), edges=[(0, 1)]))
    with pytest.raises(ValueError, match="a graph with at least one node"):
        FromGraph(nx.Graph())
    with pytest.raises(ValueError, match="ends at 7, which is not among its nodes"):
        FromGraph(SimpleNamespace(nodes=range(3), edges=[(0, 7)]))
    for thing in (3, [1, 2], np.eye(3), Ring()):
        with pytest.raises(TypeError, match="is a networkx graph, or anything with nodes and edges, or pairs"):
            FromGraph(thing)


def test_a_round_holds_what_was_chosen_when_it_began():
    graph = Chosen()
    given = {2: 0.25, 1: 0.25}
    graph.choose(src_weights=given, dst_weights=[0])
    first = as_chosen(graph)
    given[2] = 7.0
    graph.choose(self_weight=0.5, src_weights={3: 2.0}, dst_weights={4: 0.25})
    assert (first.choice.own, first.choice.sources, first.choice.factors) == (0.5, {1: 0.25, 2: 0.25}, {0: 1.0})
    assert (graph.choice.own, graph.choice.sources, graph.choice.factors) == (0.5, {3: 2.0}, {4: 0.25})


def test_two_are_never_equal_and_print_alike():
    assert Chosen() != Chosen() and repr(Chosen()) == "Chosen()"
    assert NeighborMean(Chosen()) != NeighborMean(Chosen()) and repr(NeighborMean(Chosen())) == "NeighborMean(Chosen())"


@pytest.mark.parametrize("inside", [lambda s: s, Hierarchical, lambda s: diloco(inner=s).stage])
def test_stages_take_it_however_deep(inside):
    graph = Chosen()
    stage = inside(NeighborMean(graph))
    graph.choose(src_weights={1: 0.5})
    taken = as_chosen(stage)
    graph.choose(src_weights={2: 0.5})
    inner = next(iter(taken.nested().values()), taken)
    assert inner.topology.choice.sources == {1: 0.5} and repr(taken) == repr(stage)
    assert as_chosen(NeighborMean(Ring())) == NeighborMean(Ring())


@pytest.mark.parametrize(
    "options, error, says",
    [
        ({"src_weights": [1]}, TypeError, r"src_weights is a mapping .*, not \[1\]"),
        ({"src_weights": {"a": 1.0}}, TypeError, "each rank in src_weights is a whole number, not 'a'"),
        ({"src_weights": {1: "b"}}, TypeError, r"src_weights\[1\] is a finite number, not 'b'"),
        ({"src_weights": {1: float("nan")}}, ValueError, r"src_weights\[1\] is a finite number, not nan"),
        ({"src_weights": {}, "self_weight": float("inf")}, ValueError, "self_weight is a finite number, not inf"),
        ({"src_weights": {1: 0.5}, "self_weight": 0.25}, ValueError, "sum to 0.75, not 1"),
        (
            {"src_weights": {1: 0.5}, "dst_weights": {True: 1.0}},
            TypeError,
            "each rank in dst_weights is a whole number, not True",
        ),
    ],
)
def test_what_cannot_be_chosen(options, error, says):
    graph = Chosen()
    graph.choose(src_weights={})
    with pytest.raises(error, match=says):
        graph.choose(**options)
    assert graph.choice.own == 1.0 and graph.choice.sources == {}  # holds until something else is chosen


def test_what_nobody_knows():
    unknown = r"each rank sets its own weights of Chosen\(\) in each round and does not know the weights of other ranks"
    graph = Chosen()
    for ask in (
        lambda: graph.matrix(4, 0),
        lambda: graph.weights(1, 4, 0),
        lambda: graph.targets(1, 4, 0),
        lambda: graph.period(4),
        lambda: graph.draw(4),
        lambda: graph.spectral_gap(4),
        lambda: graph.rounds_to_exactness(4),
    ):
        with pytest.raises(ValueError, match=unknown):
            ask()
    with pytest.raises(ValueError, match=r"Chosen\(\) has no weights yet"):
        as_chosen(graph)


@pytest.mark.parametrize("algorithm", [low_precision_decentralized, choco, push_sum])
def test_who_must_know_what_others_do_refuses_it(algorithm):
    comm = object.__new__(Comm)
    object.__setattr__(comm, "size", 4)
    with pytest.raises(ValueError, match=r"Chosen\(\)"):
        algorithm(Chosen()).stage.check(comm)
