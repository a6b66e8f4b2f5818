"""Graphs of one's own, for one number of ranks."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..arguments import said, several, shown
from .given import Given
from .metropolis import metropolis


@dataclass(frozen=True, init=False, repr=False)
class FromGraph(Given):
    """The neighbours in an undirected graph, with Metropolis weights:  W_ij = 1/max(d_i, d_j),  W_ii = 1 − Σ_j W_ij.

        FromGraph(networkx.petersen_graph())          FromGraph([(0, 1), (1, 2), (2, 0)])

    d counts the neighbours and the rank itself. Static, symmetric, doubly stochastic; exact only where everyone hears
    everyone. A graph in several parts never reaches the mean, and is refused. Loops, repeated edges and the weights of
    edges are ignored; for weights of one's own there is `FromMatrix(networkx.to_numpy_array(graph))`.

    A value: it holds pairs of ranks, so that it compares, hashes and prints.

    Args:
        graph: anything with `nodes` and `edges`, such as a networkx graph, or pairs of nodes.
        order: the nodes by rank. By default nodes that are 0, 1, … n − 1 are the ranks themselves, and others get
            ranks in the order in which the graph lists them, as in `networkx.to_numpy_array`.

    Raises:
        TypeError: this is no graph.
        ValueError: the graph is directed, empty or in several parts, or `order` does not name its nodes once each.

    Xiao and Boyd 2004, "Fast linear iterations for distributed averaging", Systems & Control Letters 53.
    """

    edges: tuple[tuple[int, int], ...]
    facts = ("symmetric",)  # the graph is undirected

    def __init__(self, graph: Any, order: Iterable[Hashable] | None = None) -> None:
        if _value(getattr(graph, "is_directed", False)):
            raise ValueError(
                "FromGraph takes an undirected graph, for Metropolis weights need both to hear each other; give "
                "graph.to_undirected(), FromDigraph(graph) to push_sum, or FromMatrix(...) with weights of your own"
            )
        nodes, pairs = nodes_and_edges(graph, "FromGraph")
        rank = ranks_of(nodes, order)
        for strange in (node for pair in pairs for node in pair if node not in rank):
            raise ValueError(f"an edge of the graph ends at {strange!r}, which is not among its nodes")
        edges = {(min(rank[a], rank[b]), max(rank[a], rank[b])) for a, b in pairs if a != b}
        object.__setattr__(self, "edges", tuple(sorted(edges)))
        _check_connected(sorted(rank, key=lambda node: rank[node]), _neighbors(len(rank), self.edges))

    @property
    def ranks(self) -> int:
        """The number of nodes."""
        return 1 + max((high for _, high in self.edges), default=0)

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield the rank and its neighbours in the graph."""
        near = (rank, *self._neighbors[rank])
        return metropolis(rank, {peer: 1 + len(self._neighbors[peer]) for peer in near})

    @cached_property
    def _neighbors(self) -> list[list[int]]:
        return _neighbors(self.ranks, self.edges)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self._shown(2 * len(self.edges), self._edges(self.edges), f"{self.ranks} ranks, {len(self.edges)} edges")


def nodes_and_edges(graph: Any, taker: str) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """The nodes and the pairs of nodes of whatever graph `taker` was given."""
    try:
        if hasattr(graph, "nodes") and hasattr(graph, "edges"):
            nodes, edges = list(_value(graph.nodes)), [(a, b) for a, b, *_ in _value(graph.edges)]
        else:
            edges = [(a, b) for a, b in graph]
            nodes = list(dict.fromkeys(node for edge in edges for node in edge))
    except (TypeError, ValueError):
        raise TypeError(
            f"graph of {taker} is a networkx graph, or anything with nodes and edges, or pairs of nodes, "
            f"not {shown(graph)}"
        ) from None
    if not nodes:
        raise ValueError(said("graph", "a graph with a node or more, for a group has at least one rank", graph))
    return nodes, edges


def _value(attribute: Any) -> Any:
    """Return the result of a method, or the attribute itself: libraries differ in which it is."""
    return attribute() if callable(attribute) else attribute


def ranks_of(nodes: list[Any], order: Iterable[Hashable] | None) -> dict[Any, int]:
    """The rank of each node."""
    if order is None:
        listed = range(len(nodes)) if set(nodes) == set(range(len(nodes))) else nodes
    else:
        listed = list(order) if isinstance(order, str) else several("order", order, "the nodes of the graph")
        if sorted(map(repr, listed)) != sorted(map(repr, nodes)):
            raise ValueError(
                said(
                    "order",
                    f"every node of the graph once: {shown(nodes)}",
                    order if isinstance(order, str) else listed,
                )
            )
    return {node: rank for rank, node in enumerate(listed)}


def _neighbors(size: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    neighbors: list[list[int]] = [[] for _ in range(size)]
    for low, high in edges:
        neighbors[low].append(high)
        neighbors[high].append(low)
    return neighbors


def _check_connected(nodes: list[Any], neighbors: list[list[int]]) -> None:
    reached, ahead = {0}, [0]
    while ahead:
        new = set(neighbors[ahead.pop()]) - reached
        reached |= new
        ahead += new
    for rank in range(len(nodes)):
        if rank not in reached:
            raise ValueError(
                f"this graph has several parts: node {nodes[rank]!r} never hears of node {nodes[0]!r}, "
                "so that the ranks would never agree"
            )
