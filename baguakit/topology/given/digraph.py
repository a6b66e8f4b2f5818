"""The topology of a given directed graph."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...arguments import shown
from .base import Given
from .graph import nodes_and_edges, numbered, ranks_of, unreached

Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, init=False, repr=False)
class FromDigraph(Given):
    """A given directed graph: each rank divides its values equally among itself and the ranks that it sends to.

        W_ij = 1 / (1 + d_j)    if j sends to i, or j = i;    d_j the number of ranks that j sends to

        FromDigraph(networkx.DiGraph(...))          FromDigraph([(0, 1), (1, 2), (2, 0), (0, 2)])
        FromDigraph([[(0, 1)], [(1, 2), (2, 0)]])                              one graph for each round of a period

    Column stochastic: an exchange preserves the sum over the ranks, but not the mean. It is meant for `push_sum` and
    `gradient_tracking(order="push_sum")`, which correct for that. Over the rounds of a period there must be a path
    from every rank to every other one. Loops and repeated edges are ignored.

    It holds pairs of ranks, so that it can be compared, hashed and printed.

    Args:
        graph: an object with `nodes` and `edges`, such as a networkx digraph, or pairs (sender, receiver) of nodes; or
            a sequence of either for the rounds 0, 1, 2, …, all with the same nodes.
        order: the nodes in the order of ranks; by default nodes that are 0, 1, … n − 1 are the ranks themselves.

    Raises:
        TypeError: `graph` is not a graph.
        ValueError: there is no path from one rank to another, a graph is empty, or `order` does not name each node
            once.
    """

    rounds: tuple[Edges, ...]
    size: int
    facts = ("column_stochastic",)  # a rank divides its values: its weights sum to 1

    def __init__(self, graph: Any, order: Iterable[Hashable] | None = None) -> None:
        if isinstance(graph, str | bytes):
            raise TypeError(f"graph of FromDigraph is a networkx graph or pairs of nodes, not {shown(graph)}")
        listed = [nodes_and_edges(each, "FromDigraph") for each in _rounds(graph)]
        nodes = list(dict.fromkeys(node for some, _ in listed for node in some))
        rank = ranks_of(nodes, order)
        rounds = tuple(tuple(sorted(numbered(pairs, rank))) for _, pairs in listed)
        object.__setattr__(self, "rounds", rounds)
        object.__setattr__(self, "size", len(rank))
        _check_reach(sorted(rank, key=lambda node: rank[node]), {edge for edges in rounds for edge in edges})

    @property
    def ranks(self) -> int:
        return self.size

    def period(self, size: int) -> int:
        """Return the number of graphs; 1 for one rank."""
        return len(self.rounds) if size > 1 else 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        senders, targets = self._by_rank[round % len(self.rounds)]
        return ((peer, 1 / (1 + len(targets[peer]))) for peer in (rank, *senders[rank]))

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        return tuple(self._by_rank[round % len(self.rounds)][1][rank]) if size > 1 else ()

    def symmetric(self, size: int) -> bool:
        return all(
            set(edges) == {(b, a) for a, b in edges} and all(len(t) == len(targets[0]) for t in targets)
            for edges, (_, targets) in zip(self.rounds, self._by_rank, strict=True)
        )

    @cached_property
    def _by_rank(self) -> list[tuple[list[list[int]], list[list[int]]]]:
        """Return for each round the senders to each rank and the targets of each rank."""
        rounds = []
        for edges in self.rounds:
            senders: list[list[int]] = [[] for _ in range(self.size)]
            targets: list[list[int]] = [[] for _ in range(self.size)]
            for sender, hearer in edges:
                senders[hearer].append(sender)
                targets[sender].append(hearer)
            rounds.append((senders, targets))
        return rounds

    __hash__ = Given.__hash__  # not that of a dataclass

    def __repr__(self) -> str:
        lists = [self._edges(edges) for edges in self.rounds]
        entries = sum(2 * len(edges) for edges in self.rounds)
        shown = lists if len(lists) > 1 else lists[0]
        return self._shown(entries, shown, f"{self.size} ranks, {entries // 2} edges")


def _rounds(graph: Any) -> list[Any]:
    """Return the graph of each round: one, unless `graph` is a sequence of graphs."""
    if hasattr(graph, "nodes"):
        return [graph]
    try:
        listed = list(graph)
    except TypeError:
        return [graph]
    first = listed[0] if listed else None
    pair = isinstance(first, tuple | list) and len(first) in (2, 3) and not isinstance(first[0], tuple | list)
    return [graph] if first is None else [listed] if pair else listed


def _check_reach(nodes: list[Any], edges: set[tuple[int, int]]) -> None:
    for forward in (True, False):
        following: list[list[int]] = [[] for _ in nodes]
        for a, b in edges:
            following[a if forward else b].append(b if forward else a)
        for rank in unreached(following)[:1]:
            start, end = (nodes[0], nodes[rank]) if forward else (nodes[rank], nodes[0])
            raise ValueError(
                f"there is no path from node {start!r} to node {end!r}, so the ranks would never agree; add an edge"
            )
