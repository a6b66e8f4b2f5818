"""Topologies built from the user's matrices and graphs, each for one number of ranks."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import fsum
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import describe, message, several
from .base import Given
from .static import metropolis

Edges = tuple[tuple[int, int], ...]
Matrix = tuple[tuple[float, ...], ...]

_ROUNDING = 1e-6  # the error of single precision; a matrix with a larger one is refused


@dataclass(frozen=True, init=False, repr=False)
class FromMatrix(Given):
    """A given mixing matrix, or one for each round of a period:  x ← W_{t mod τ} x,  row i holds the weights of rank i.

        FromMatrix([[0.75, 0.25], [0.25, 0.75]])          FromMatrix([first, second, third])

    Each matrix must be doubly stochastic. A sum may differ from 1 by 1e-6, the error of single precision: the weights
    are then corrected by about as much, so that sums are 1 to within 1e-15. A sequence that repeats itself is stored
    once. Period, symmetry and rounds to exactness follow from the matrices. Connectivity is not checked: if ranks do
    not all reach each other, `spectral_gap` is 0.

    It holds nested tuples, so that it can be compared, hashed and printed.

    Args:
        matrix: a square matrix, or a sequence of matrices for rounds 0, 1, 2, …: lists, numpy arrays, CPU tensors.

    Raises:
        TypeError: `matrix` is neither a matrix nor a sequence of them.
        ValueError: a matrix is not square, has another size than the first, or is not doubly stochastic; the message
            names the worst row or column.
    """

    rounds: tuple[Matrix, ...]

    def __init__(self, matrix: Any) -> None:
        rounds = [_doubly_stochastic(mixing, where) for mixing, where in _matrices(matrix)]
        stored = tuple(tuple(tuple(map(float, row)) for row in mixing) for mixing in rounds)
        vars(self).update(rounds=stored[: _smallest_period(stored)])

    @classmethod
    def metropolis(cls, matrix: Any) -> "FromMatrix":
        """Return the topology with the graph of this matrix, or of each round, and Metropolis weights.

        Two ranks are neighbours if either has a weight for the other:
        W_ij = 1 / max(d_i, d_j), d_i the number of neighbours of i plus 1;  W_ii = 1 − Σ_j W_ij.
        """
        rounds = []
        for mixing, _ in _matrices(matrix):
            linked = (mixing != 0) | (mixing.T != 0) | np.eye(len(mixing), dtype=bool)
            degrees, weights = linked.sum(axis=1).tolist(), np.zeros(mixing.shape)
            for rank, row in enumerate(linked):
                for peer, weight in metropolis(rank, {i: degrees[i] for i in np.flatnonzero(row).tolist()}):
                    weights[rank, peer] = weight
            rounds.append(weights)
        return cls(rounds)

    @property
    def ranks(self) -> int:
        return len(self.rounds[0])

    def period(self, size: int) -> int:
        """Return the number of matrices, without repetitions; 1 for one rank."""
        return len(self.rounds) if self._ranks(size) > 1 else 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        row = self.rounds[round % len(self.rounds)][rank]
        return ((peer, weight) for peer, weight in enumerate(row) if weight)

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        rank, size, round = self._place(rank, size, round)
        if size == 1:
            return ()
        rows = self.rounds[round % len(self.rounds)]
        return tuple(peer for peer, row in enumerate(rows) if row[rank] and peer != rank)

    __hash__ = Given.__hash__  # not that of a dataclass

    def __repr__(self) -> str:
        period, ranks = len(self.rounds), self.ranks
        summary = f"{ranks} ranks, {period} round{'s' * (period > 1)}"
        return self._shown(period * ranks**2, [[list(row) for row in mixing] for mixing in self.rounds], summary)


def _matrices(given: Any) -> list[tuple[NDArray[np.float64], str]]:
    """Return each square matrix, and its name for error messages."""
    rounds = _arrays([given])
    if not rounds or rounds[0].ndim != 2:
        rounds = _arrays(given)
    if not rounds or any(each.ndim != 2 for each in rounds):
        raise TypeError(
            f"FromMatrix takes a square matrix or a sequence of these, one for each round, not {describe(given)}"
        )
    for round, each in enumerate(rounds):
        if each.shape[0] != each.shape[1] or not each.size:
            found = f"this one is {' × '.join(map(str, each.shape))}: {describe(given)}"
            raise ValueError(f"a mixing matrix has a row and a column for each rank; {found}")
        if each.shape != rounds[0].shape:
            others = " and that of round 0 ".join(f"{len(w)} × {len(w)}" for w in (each, rounds[0]))
            raise ValueError(f"the matrix of round {round} is {others}")
    return [(each, "the matrix" + f" of round {t}" * (len(rounds) > 1)) for t, each in enumerate(rounds)]


def _arrays(given: Any) -> list[NDArray[np.float64]]:
    """Return each as an array; [] if one is not made of numbers, or of rows of different lengths."""
    try:
        return [np.asarray(each, dtype=np.float64) for each in given]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return []


def _doubly_stochastic(mixing: NDArray[np.float64], where: str) -> NDArray[np.float64]:
    """Return the matrix, rounding errors corrected; raise ValueError if it is not doubly stochastic otherwise."""
    instead = "FromMatrix.metropolis(matrix) gives its graph Metropolis weights, which are doubly stochastic"
    for row, column in np.argwhere(~np.isfinite(mixing) | (mixing < -_ROUNDING))[:1]:
        weight = f"the weight {mixing[row, column]:.9g} in row {row}, column {column} of {where}"
        raise ValueError(f"{weight} is negative or not finite, and a mean has no such weights; {instead}")
    mixing = np.where(mixing > 0, mixing, 0.0)
    sums = line_sums(mixing)
    if is_doubly_stochastic(mixing):
        return mixing
    if np.abs(sums - 1).max() <= _ROUNDING:
        corrected = _corrected(mixing)
        if is_doubly_stochastic(corrected) and np.abs(corrected - mixing).max() <= 10 * _ROUNDING:
            return corrected
    size, worst = len(mixing), int(np.abs(sums - 1).argmax())
    line = f"row {worst}" if worst < size else f"column {worst - size}"
    raise ValueError(
        f"{line} of {where} sums to {sums[worst]:.9g}, not 1, so that the mean over the ranks would move; {instead}"
    )


def _corrected(mixing: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return W_ij (1 + u_i + v_j), with u and v such that rows and columns sum to 1, by three steps of Newton."""
    size, symmetric = len(mixing), np.array_equal(mixing, mixing.T)
    for _ in range(3):
        if is_doubly_stochastic(mixing):
            break
        sums = line_sums(mixing)
        system = np.diag(sums)
        system[:size, size:], system[size:, :size] = mixing, mixing.T
        change = np.linalg.lstsq(system, 1 - sums, rcond=None)[0]
        u, v = change[:size], change[size:]
        if symmetric:
            u = v = (u + v) / 2
        mixing = mixing * (1 + (u[:, None] + v))
    return mixing


def _smallest_period(rounds: tuple[Matrix, ...]) -> int:
    lengths = (length for length in range(1, len(rounds)) if len(rounds) % length == 0)
    return next((n for n in lengths if all(a == b for a, b in zip(rounds, rounds[n:], strict=False))), len(rounds))


def is_doubly_stochastic(mixing: NDArray[np.float64]) -> bool:
    """Return whether no weight is negative and every row and column sums to 1."""
    return bool((mixing >= 0).all()) and bool(np.abs(line_sums(mixing) - 1).max() <= 1e-15)


def line_sums(mixing: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of the rows, then of the columns, each rounded once."""
    return np.array([fsum(line) for line in (*mixing, *mixing.T)])


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
        vars(self).update(edges=tuple(sorted(edges)))
        for first, apart in unreached(list(rank), [*edges, *backwards(edges)]):
            raise ValueError(
                f"this graph is not connected: there is no path between node {apart!r} and node {first!r}, "
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
        return one_edge_after(self.ranks, [*self.edges, *backwards(self.edges)])

    __hash__ = Given.__hash__  # not that of a dataclass

    def __repr__(self) -> str:
        edges = len(self.edges)
        return self._shown(2 * edges, [_to_print(self.edges)], f"{self.ranks} ranks, {edges} edges")


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
            raise TypeError(f"graph of FromDigraph is a networkx graph or pairs of nodes, not {describe(graph)}")
        listed = [nodes_and_edges(each, "FromDigraph") for each in _rounds(graph)]
        nodes = list(dict.fromkeys(node for some, _ in listed for node in some))
        rank = ranks_of(nodes, order)
        rounds = tuple(tuple(sorted(numbered(pairs, rank))) for _, pairs in listed)
        vars(self).update(rounds=rounds, size=len(rank))
        edges, nodes = {edge for each in rounds for edge in each}, list(rank)
        back = [(end, start) for start, end in unreached(nodes, backwards(edges))]
        for start, end in [*unreached(nodes, edges), *back]:
            raise ValueError(
                f"there is no path from node {start!r} to node {end!r}, so the ranks would never agree; add an edge"
            )

    @property
    def ranks(self) -> int:
        return self.size

    def period(self, size: int) -> int:
        """Return the number of graphs; 1 for one rank."""
        return len(self.rounds) if self._ranks(size) > 1 else 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        senders, targets = self._by_rank[round % len(self.rounds)]
        return ((peer, 1 / (1 + len(targets[peer]))) for peer in (rank, *senders[rank]))

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        rank, size, round = self._place(rank, size, round)
        return tuple(self._by_rank[round % len(self.rounds)][1][rank]) if size > 1 else ()

    @cached_property
    def _by_rank(self) -> list[tuple[list[list[int]], list[list[int]]]]:
        """Return for each round the senders to each rank and the targets of each rank."""
        size = self.size
        return [(one_edge_after(size, backwards(edges)), one_edge_after(size, edges)) for edges in self.rounds]

    __hash__ = Given.__hash__  # not that of a dataclass

    def __repr__(self) -> str:
        edges = sum(map(len, self.rounds))
        return self._shown(2 * edges, [_to_print(each) for each in self.rounds], f"{self.size} ranks, {edges} edges")


def nodes_and_edges(graph: Any, taker: str) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """Return the nodes and the edges of a graph; `taker` names the class in an error."""
    try:
        if hasattr(graph, "nodes") and hasattr(graph, "edges"):
            nodes, edges = list(_value(graph.nodes)), [(a, b) for a, b, *_ in _value(graph.edges)]
        else:
            pairs = graph.tolist() if hasattr(graph, "tolist") else graph  # values of a tensor equal no other's
            edges = [(a, b) for a, b in pairs]
            nodes = list(dict.fromkeys(node for edge in edges for node in edge))
    except (TypeError, ValueError):
        raise TypeError(
            f"graph of {taker} is a networkx graph, or anything with nodes and edges, or pairs of nodes, "
            f"not {describe(graph)}"
        ) from None
    if not nodes:
        raise ValueError(message("graph", "a graph with at least one node", graph))
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
            raise ValueError(message("order", f"every node of the graph once: {describe(nodes)}", given))
    return {node: rank for rank, node in enumerate(listed)}


def numbered(pairs: Iterable[tuple[Any, Any]], rank: dict[Any, int]) -> set[tuple[int, int]]:
    """Return pairs of nodes as pairs of ranks, without loops; raise ValueError for a node without a rank."""
    pairs = list(pairs)
    for unknown in (node for pair in pairs for node in pair if node not in rank):
        raise ValueError(f"an edge of the graph ends at {unknown!r}, which is not among its nodes")
    return {(rank[a], rank[b]) for a, b in pairs if a != b}


def unreached(nodes: list[Any], edges: Iterable[tuple[int, int]]) -> list[tuple[Any, Any]]:
    """Return the first node and the first node that no path from it reaches; [] if it reaches all nodes."""
    after, reached, ahead = one_edge_after(len(nodes), edges), {0}, [0]
    while ahead:
        new = set(after[ahead.pop()]) - reached
        reached |= new
        ahead += new
    return [(nodes[0], node) for rank, node in enumerate(nodes) if rank not in reached][:1]


def one_edge_after(size: int, edges: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Return the ranks one edge after each rank."""
    after: list[list[int]] = [[] for _ in range(size)]
    for first, second in edges:
        after[first].append(second)
    return after


def _to_print(edges: Edges) -> list[tuple[int, int]]:
    return list(edges) or [(0, 0)]  # for one rank a loop, which has no effect


def backwards(edges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the edges, each in the other direction."""
    return [(second, first) for first, second in edges]


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
