"""`Chosen`: what a rank may choose, and what nobody can say of it. No processes."""

import pytest

from baguakit.algorithms import choco, diloco, low_precision_decentralized, push_sum
from baguakit.comm import Comm
from baguakit.stages import Hierarchical, NeighborMean
from baguakit.topology import Chosen, Ring
from baguakit.topology.chosen import as_chosen


def test_a_round_holds_what_was_chosen_when_it_began():
    graph = Chosen()
    given = {2: 0.25, 1: 0.25}
    graph.choose(src_weights=given, dst_weights=[0])
    first = graph.fixed()
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
        graph.fixed()


@pytest.mark.parametrize("algorithm", [low_precision_decentralized, choco, push_sum])
def test_who_must_know_what_others_do_refuses_it(algorithm):
    comm = object.__new__(Comm)
    object.__setattr__(comm, "size", 4)
    with pytest.raises(ValueError, match=r"Chosen\(\)"):
        algorithm(Chosen()).stage.check(comm)
