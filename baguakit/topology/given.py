"""Topologies from the user's matrices and graphs, each for one number of ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import describe, message
from .base import Topology, has_unit_sums
from .static import metropolis

Rows = list[dict[int, float]]  # the weights of all ranks in one round
Edges = Iterable[tuple[int, int]]
_ROUNDING = 1e-6  # the error of single precision; a matrix with a larger one is refused
_SHORT = 64  # a value with more entries prints a digest of them


@dataclass(frozen=True, init=False, repr=False)
class Given(Topology):
    """A topology for one number of ranks: for each round a matrix or graph, as tuples that compare, hash and print."""

    rounds: tuple[tuple[Any, ...], ...]
    ranks: int

    def _rows_of(self, given: tuple[Any, ...]) -> Rows:
        """Return a list of {peer: weight}, by rank, for the matrix or graph of a round; leave out weights of 0."""
        raise NotImplementedError

    @cached_property
    def _by_round(self) -> list[Rows]:
        return list(map(self._rows_of, self.rounds))

    def check(self, size: int) -> None:
        """Raise a ValueError unless the group has `self.ranks` ranks, or only one."""
        super().check(size)
        if size not in (1, self.ranks):
            raise ValueError(f"this {type(self).__name__} was given for {self.ranks} ranks and the group has {size}")

    def period(self, size: int) -> int:
        """Return the number of rounds given; 1 for one rank."""
        return len(self.rounds) if self._ranks(size) > 1 else 1

    def links(self, rank: int, size: int, round: int) -> Iterable[tuple[int, float]]:
        return self._by_round[round % len(self.rounds)][rank].items()

    @cached_property
    def _hash(self) -> int:  # every step hashes it, and a large value takes long
        return hash((self.rounds, self.ranks))

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        edges = sum(map(len, self.rounds))
        listed = [list(each) or [(0, 0)] for each in self.rounds]  # for one rank a loop, which has no effect
        return self._shown(listed, 2 * edges, f"{edges} edges")

    def _shown(self, rounds: list[Any], entries: int, summary: str) -> str:
        contents: Any = rounds if len(rounds) > 1 else rounds[0]
        if entries > _SHORT:
            contents = f"<{self.ranks} ranks, {summary}, sha256 {sha256(repr(contents).encode()).hexdigest()[:12]}>"
        return f"{type(self).__name__}({contents})"


class FromMatrix(Given):
    """A given mixing matrix, or τ matrices W_0, W_1, … that repeat: round t computes  x ← W_{t mod τ} x.

        FromMatrix([[0.75, 0.25], [0.25, 0.75]])          FromMatrix([first, second, third])

    Row i of a matrix has the weights of rank i. Each matrix must be doubly stochastic. If a sum differs from 1 by up to
    1e-6, as in single precision, the weights are corrected, so that sums are 1 to within 1e-15. Connectivity
    is not checked: if a rank cannot reach another rank, `spectral_gap` is 0.

    Args:
        matrix: a square matrix, or a sequence of matrices for rounds 0, 1, 2, …: lists, numpy arrays, CPU tensors.

    Raises:
        TypeError: `matrix` is neither a matrix nor a sequence of matrices.
        ValueError: a matrix is not square, differs in size from the first, or is not doubly stochastic.
    """

    facts = ("doubly_stochastic",)  # the constructor refuses everything else

    def __init__(self, matrix: Any) -> None:
        rounds = [_doubly_stochastic(mixing, where) for mixing, where in _matrices(matrix)]
        stored = tuple(tuple(tuple(map(float, row)) for row in mixing) for mixing in rounds)
        laps = (n for n in range(1, len(stored) + 1) if stored[:n] * (len(stored) // n) == stored)
        vars(self).update(rounds=stored[: next(laps)], ranks=len(stored[0]))

    def _rows_of(self, given: tuple[Any, ...]) -> Rows:
        return [{peer: weight for peer, weight in enumerate(row) if weight} for row in given]

    def __repr__(self) -> str:
        period = len(self.rounds)
        rounds = [[list(row) for row in mixing] for mixing in self.rounds]
        return self._shown(rounds, period * self.ranks**2, f"{period} round{'s' * (period > 1)}")


def _matrices(given: Any) -> list[tuple[NDArray[np.float64], str]]:
    """Return (square matrix, its name for error messages) for each round; raise if `given` has no such matrices."""
    rounds: list[NDArray[np.float64]] = []
    for listed in ([given], given):  # one matrix, or one for each round
        try:
            rounds = [np.asarray(each, dtype=np.float64) for each in listed]
        except (TypeError, ValueError, RuntimeError, OverflowError):  # no numbers, or rows of different lengths
            rounds = []
        if rounds and rounds[0].ndim == 2:
            break
    if not rounds or any(each.ndim != 2 for each in rounds):
        raise TypeError(f"FromMatrix takes a square matrix, or a sequence of one for each round, not {describe(given)}")
    for round, each in enumerate(rounds):
        if each.shape[0] != each.shape[1] or not each.size:
            found = f"this one is {' × '.join(map(str, each.shape))}: {describe(given)}"
            raise ValueError(f"a mixing matrix has a row and a column for each rank; {found}")
        if each.shape != rounds[0].shape:
            others = " and that of round 0 ".join(f"{len(w)} × {len(w)}" for w in (each, rounds[0]))
            raise ValueError(f"the matrix of round {round} is {others}")
    return [(each, "the matrix" + f" of round {t}" * (len(rounds) > 1)) for t, each in enumerate(rounds)]


def _doubly_stochastic(mixing: NDArray[np.float64], where: str) -> NDArray[np.float64]:
    """Return the matrix with corrected rounding errors; raise ValueError if it is not doubly stochastic."""
    instead = "FromGraph(numpy.argwhere(matrix)) gives its graph Metropolis weights, which are doubly stochastic"
    for row, column in np.argwhere(~np.isfinite(mixing) | (mixing < -_ROUNDING))[:1]:
        weight = f"the weight {mixing[row, column]:.9g} in row {row}, column {column} of {where}"
        raise ValueError(f"{weight} is negative or not finite, and a mean has no such weights; {instead}")
    mixing = np.where(mixing > 0, mixing, 0.0)
    corrected, size = mixing, len(mixing)
    away = found = _sums(mixing) - 1
    for _ in range(3):  # Newton's steps to W_ij (1 + u_i + v_j), with u and v such that rows and columns sum to 1
        if has_unit_sums(corrected) or np.abs(found).max() > _ROUNDING:
            break
        system = np.diag(away + 1)
        system[:size, size:], system[size:, :size] = corrected, corrected.T
        u, v = np.split(np.linalg.lstsq(system, -away, rcond=None)[0], 2)
        if np.array_equal(mixing, mixing.T):
            u = v = (u + v) / 2
        corrected = corrected * (1 + (u[:, None] + v))
        away = _sums(corrected) - 1
    if has_unit_sums(corrected) and np.abs(corrected - mixing).max() <= 10 * _ROUNDING:
        return corrected
    worst = int(np.abs(found).argmax())
    line = f"row {worst}" if worst < size else f"column {worst - size}"
    raise ValueError(
        f"{line} of {where} sums to {found[worst] + 1:.9g}, not 1, so that the mean over the ranks would move; "
        f"{instead}"
    )


def _sums(mixing: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of the rows, then of the columns, each rounded once."""
    return np.array([fsum(line) for line in (*mixing, *mixing.T)])


class FromGraph(Given):
    """A given undirected graph with Metropolis weights:  W_ij = 1/max(d_i, d_j),  W_ii = 1 − Σ_{j≠i} W_ij.

        FromGraph(networkx.petersen_graph())          FromGraph([(0, 1), (1, 2), (2, 0)])

    i and j are neighbours, and rank i has d_i − 1 neighbours. Static, symmetric, doubly stochastic.
    Loops, repeated edges and weights of edges are ignored; `FromMatrix(networkx.to_numpy_array(graph))` uses weights.

    Args:
        graph: an object with `nodes` and `edges`, such as a networkx graph, or pairs of nodes. If the n nodes are
            0, 1, … n − 1, they are the ranks. Otherwise nodes are numbered in the order in which the graph lists
            them, as in `networkx.to_numpy_array`.

    Raises:
        TypeError: `graph` is not a graph.
        ValueError: the graph is directed, empty or not connected.

    Xiao and Boyd 2004, doi:10.1016/j.sysconle.2004.02.022.
    """

    facts = ("symmetric", "doubly_stochastic")  # the graph is undirected; rows sum to 1

    def __init__(self, graph: Any) -> None:
        if hasattr(graph, "is_directed") and graph.is_directed():
            raise ValueError(
                "FromGraph takes an undirected graph, since Metropolis weights are symmetric; "
                "pass graph.to_undirected(), use FromDigraph(graph) with push_sum, or set weights with FromMatrix(...)"
            )
        nodes, (pairs,) = read_graphs([graph], "FromGraph")
        edges = tuple(sorted({(min(pair), max(pair)) for pair in pairs}))
        vars(self).update(rounds=(edges,), ranks=len(nodes))
        for apart in unreached(len(nodes), [*edges, *(pair[::-1] for pair in edges)]):
            raise ValueError(
                f"this graph is not connected: there is no path between node {nodes[apart]!r} and node {nodes[0]!r}, "
                "so the ranks would never agree; add an edge"
            )

    def _rows_of(self, given: tuple[Any, ...]) -> Rows:
        peers = one_edge_after(self.ranks, [*given, *(pair[::-1] for pair in given)])
        near = [[rank, *each] for rank, each in enumerate(peers)]
        return [dict(metropolis(rank, near.__getitem__)) for rank in range(self.ranks)]


class FromDigraph(Given):
    """A given directed graph: each rank divides its values equally among itself and the ranks that it sends to.

        W_ij = 1 / (1 + d_j)    if j sends to i, or j = i;    d_j the number of ranks that j sends to

        FromDigraph(networkx.DiGraph(...))          FromDigraph([(0, 1), (1, 2), (2, 0), (0, 2)])
        FromDigraph([[(0, 1)], [(1, 2), (2, 0)]])                              one graph for each round of a period

    Column stochastic: an exchange preserves the sum over the ranks, but ranks with equal values do not keep them; use
    `push_sum` or `gradient_tracking(order="push_sum")`, which correct this. Loops and repeated edges are ignored.

    Args:
        graph: an object with `nodes` and `edges`, such as a networkx digraph, or pairs (sender, receiver) of nodes; or
            a sequence of either for rounds 0, 1, 2, …, with the same ranks. Nodes are numbered as in `FromGraph`.

    Raises:
        TypeError: `graph` is not a graph.
        ValueError: there is no path from one rank to another in the union of all graphs, or a graph is empty.
    """

    facts = ("column_stochastic",)  # a rank divides its values: its weights sum to 1

    def __init__(self, graph: Any) -> None:
        nodes, listed = read_graphs(_rounds(graph), "FromDigraph")
        vars(self).update(rounds=tuple(tuple(sorted(pairs)) for pairs in listed), ranks=len(nodes))
        edges = set[tuple[int, int]]().union(*listed)
        there = [(0, rank) for rank in unreached(len(nodes), edges)]
        back = [(rank, 0) for rank in unreached(len(nodes), [pair[::-1] for pair in edges])]
        for start, end in there + back:
            raise ValueError(f"no path leads from node {nodes[start]!r} to node {nodes[end]!r}; add an edge")

    def _rows_of(self, given: tuple[Any, ...]) -> Rows:
        shares = [1 / (1 + len(each)) for each in one_edge_after(self.ranks, given)]
        senders = one_edge_after(self.ranks, [pair[::-1] for pair in given])
        return [{peer: shares[peer] for peer in (rank, *heard)} for rank, heard in enumerate(senders)]


def read_graphs(graphs: list[Any], taker: str) -> tuple[list[Any], list[set[tuple[int, int]]]]:
    """Return the nodes by rank, and the edges of each graph as pairs of ranks, without loops; errors name `taker`."""
    found, listed = [], []
    for graph in graphs:
        try:
            if hasattr(graph, "nodes") and hasattr(graph, "edges"):
                some, pairs = list(graph.nodes), [(a, b) for a, b, *_ in graph.edges]
            else:
                # Two elements of a tensor are never equal as dict keys, so make a list of numbers.
                pairs = [(a, b) for a, b in (graph.tolist() if hasattr(graph, "tolist") else graph)]
                some = [node for edge in pairs for node in edge]
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(
                f"graph of {taker} is a networkx graph, or anything with nodes and edges, or pairs of nodes, "
                f"not {describe(graph)}"
            ) from None
        if not some:
            raise ValueError(message("graph", "a graph with at least one node", graph))
        found += some
        listed.append(pairs)
    nodes = list(dict.fromkeys(found))
    if set(nodes) == set(range(len(nodes))):
        nodes.sort()
    rank = {node: i for i, node in enumerate(nodes)}
    for unknown in (node for pairs in listed for pair in pairs for node in pair if node not in rank):
        raise ValueError(f"an edge of the graph ends at {unknown!r}, which is not among its nodes")
    return nodes, [{(rank[a], rank[b]) for a, b in pairs if a != b} for pairs in listed]


def _rounds(graph: Any) -> list[Any]:
    """Return the graphs of all rounds. Unless `graph` is a sequence of graphs, it is the only graph."""
    if hasattr(graph, "nodes") or isinstance(graph, str | bytes) or not isinstance(graph, Iterable):
        return [graph]
    try:
        first, *others = list(graph) or [None]
    except (TypeError, RuntimeError):  # tensors that are sparse or have no dimensions say that they are iterable
        return [graph]
    pair = isinstance(first, tuple | list) and len(first) in (2, 3) and not isinstance(first[0], tuple | list)
    return [graph] if first is None else [[first, *others]] if pair else [first, *others]


def unreached(size: int, edges: Edges) -> list[int]:
    """Return the ranks to which no path leads from rank 0."""
    after, reached, ahead = one_edge_after(size, edges), {0}, [0]
    while ahead:
        new = set(after[ahead.pop()]) - reached
        reached |= new
        ahead += new
    return [rank for rank in range(size) if rank not in reached]


def one_edge_after(size: int, edges: Edges) -> list[list[int]]:
    """Return a list for each rank: the ranks to which an edge leads from this rank."""
    after: list[list[int]] = [[] for _ in range(size)]
    for first, second in edges:
        after[first].append(second)
    return after
