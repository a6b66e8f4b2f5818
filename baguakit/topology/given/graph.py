"""The topology of a given undirected graph."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from ...arguments import said, several, shown
from ..metropolis import metropolis
from .base import Given


@dataclass(frozen=True, init=False, repr=False)
class FromGraph(Given):
    """A given undirected graph with Metropolis weights:  W_ij = 1/max(d_i, d_j),  W_ii = 1 − Σ_j W_ij.

        FromGraph(networkx.petersen_graph())          FromGraph([(0, 1), (1, 2), (2, 0)])

    d_i is the number of neighbours of rank i plus 1. Static, symmetric, doubly stochastic; exact only if the graph is
    complete. Loops, repeated edges and the weights of edges are ignored; to set the weights, use
    `FromMatrix(networkx.to_numpy_array(graph))`.

    It holds pairs of ranks, so that it can be compared, hashed and printed.

    Args:
        graph: an object with `nodes` and `edges`, such as a networkx graph, or pairs of nodes.
        order: the nodes in the order of ranks. By default nodes that are 0, 1, … n − 1 are the ranks themselves; other
            nodes are numbered in the order in which the graph lists them, as in `networkx.to_numpy_array`.

    Raises:
        TypeError: `graph` is not a graph.
        ValueError: the graph is directed, empty or not connected, or `order` does not name each node once.

    Xiao and Boyd 2004, "Fast linear iterations for distributed averaging",
    doi:10.1016/j.sysconle.2004.02.022.
    """

    edges: tuple[tuple[int, int], ...]
    facts: ClassVar[tuple[str, ...]] = ("symmetric", "doubly_stochastic")  # the graph is undirected; rows sum to 1

    def __init__(self, graph: Any, order: Iterable[Hashable] | None = None) -> None:
        if _value(getattr(graph, "is_directed", False)):
            raise ValueError(
                "FromGraph takes an undirected graph, since Metropolis weights are symmetric; "
                "pass graph.to_undirected(), use FromDigraph(graph) with push_sum, or set weights with FromMatrix(...)"
            )
        nodes, pairs = nodes_and_edges(graph, "FromGraph")
        rank = ranks_of(nodes, order)
        edges = {(min(a, b), max(a, b)) for a, b in numbered(pairs, rank)}
        object.__setattr__(self, "edges", tuple(sorted(edges)))
        nodes = sorted(rank, key=lambda node: rank[node])
        for apart in unreached(_neighbors(len(rank), self.edges))[:1]:
            raise ValueError(
                f"this graph is not connected: there is no path between node {nodes[apart]!r} and node {nodes[0]!r}, "
                "so the ranks would never agree; add an edge"
            )

    @cached_property
    def ranks(self) -> int:
        return 1 + max((high for _, high in self.edges), default=0)

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        near = (rank, *self._neighbors[rank])
        return metropolis(rank, {peer: 1 + len(self._neighbors[peer]) for peer in near})

    @cached_property
    def _neighbors(self) -> list[list[int]]:
        return _neighbors(self.ranks, self.edges)

    __hash__ = Given.__hash__  # not that of a dataclass

    def __repr__(self) -> str:
        return self._shown(2 * len(self.edges), self._edges(self.edges), f"{self.ranks} ranks, {len(self.edges)} edges")


def nodes_and_edges(graph: Any, taker: str) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Return the nodes and the edges of a graph; `taker` names the class in an error."""
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
        raise ValueError(said("graph", "a graph with at least one node", graph))
    return nodes, edges


def _value(attribute: Any) -> Any:
    """Return the result of a method, or the attribute itself: libraries differ."""
    return attribute() if callable(attribute) else attribute


def ranks_of(nodes: list[Any], order: Iterable[Hashable] | None) -> dict[Any, int]:
    """Return the rank of each node."""
    if order is None:
        listed = range(len(nodes)) if set(nodes) == set(range(len(nodes))) else nodes
    else:
        listed = list(order) if isinstance(order, str) else several("order", order, "the nodes of the graph")
        if sorted(map(repr, listed)) != sorted(map(repr, nodes)):
            given = order if isinstance(order, str) else listed
            raise ValueError(said("order", f"every node of the graph once: {shown(nodes)}", given))
    return {node: rank for rank, node in enumerate(listed)}


def numbered(pairs: Iterable[tuple[Any, Any]], rank: dict[Any, int]) -> set[tuple[int, int]]:
    """Return pairs of nodes as pairs of ranks, without loops; raise ValueError for a node without a rank."""
    pairs = list(pairs)
    for unknown in (node for pair in pairs for node in pair if node not in rank):
        raise ValueError(f"an edge of the graph ends at {unknown!r}, which is not among its nodes")
    return {(rank[a], rank[b]) for a, b in pairs if a != b}


def unreached(following: Sequence[Iterable[int]]) -> list[int]:
    """Return the ranks to which no path leads from rank 0; `following[i]` are the ranks one edge after rank i."""
    reached, ahead = {0}, [0]
    while ahead:
        new = set(following[ahead.pop()]) - reached
        reached |= new
        ahead += new
    return [rank for rank in range(len(following)) if rank not in reached]


def _neighbors(size: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    neighbors: list[list[int]] = [[] for _ in range(size)]
    for low, high in edges:
        neighbors[low].append(high)
        neighbors[high].append(low)
    return neighbors
