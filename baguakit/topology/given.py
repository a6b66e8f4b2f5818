"""Topologies of one's own: a matrix, a sequence of matrices, or a graph, for one number of ranks."""

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Topology, is_doubly_stochastic, line_sums
from .metropolis import metropolis, metropolis_matrix

Matrix = tuple[tuple[float, ...], ...]

# As far as single precision may be off; what is off by more was not meant to be doubly stochastic.
_ROUNDING = 1e-6
# A value with more entries than this prints a digest of them instead.
_SHORT = 64


class _Given(Topology):
    """For one number of ranks. Large values are compared and hashed at every step: the hash is remembered."""

    @property
    @abstractmethod
    def ranks(self) -> int:
        """The number of ranks that this was given for."""

    def check(self, size: int) -> None:
        """Raise ValueError unless the group has as many ranks as this was given for; one rank alone is allowed."""
        super().check(size)
        if size not in (1, self.ranks):
            name = type(self).__name__
            raise ValueError(f"this {name} was given for {self.ranks} ranks and the group has {size}")

    def doubly_stochastic(self, size: int) -> bool:
        """True: anything else is refused at the beginning."""
        self.check(size)
        return True

    @cached_property
    def _hash(self) -> int:
        return hash((type(self).__name__, *vars(self).values()))

    def _shown(self, entries: int, contents: Any, summary: str) -> str:
        if entries > _SHORT:
            contents = f"<{summary}, sha256 {sha256(repr(contents).encode()).hexdigest()[:12]}>"
        return f"{type(self).__name__}({contents})"


@dataclass(frozen=True, init=False, repr=False)
class FromMatrix(_Given):
    """The mixing matrix, or one for each round of a period:  x ← W_{t mod τ} x,  row i is what rank i hears.

        FromMatrix([[0.75, 0.25], [0.25, 0.75]])          FromMatrix([first, second, third])

    Each must be doubly stochastic, or it is refused, with its worst row or column. Sums may be off by what single
    precision is off by, 1e-6; the weights are then moved by about as much, so that they sum to 1 to 1e-15. A sequence
    that repeats itself is kept once. Period, symmetry and rounds to exactness are those of the matrices; whether all
    ranks are ever reached is left to `spectral_gap`, which is 0 if they are not.

    A value: it holds nested tuples, so that it compares, hashes and prints.

    Args:
        matrix: square, or a sequence of these for the rounds 0, 1, 2, …: lists, a numpy array, a tensor on the CPU.
    """

    rounds: tuple[Matrix, ...]

    def __init__(self, matrix: Any) -> None:
        rounds = [_doubly_stochastic(mixing, where) for mixing, where in _matrices(matrix)]
        stored = tuple(tuple(tuple(map(float, row)) for row in mixing) for mixing in rounds)
        object.__setattr__(self, "rounds", stored[: _smallest_period(stored)])

    @classmethod
    def metropolis(cls, matrix: Any) -> "FromMatrix":
        """The graph of this matrix, or of each round, with Metropolis weights, which are doubly stochastic.

        Two ranks are neighbours where either has a weight for the other, whatever the weight:
        W_ij = 1 / max(d_i, d_j), d the number of neighbours and the rank itself; W_ii = 1 − Σ_j W_ij.
        """
        rounds = []
        for mixing, _ in _matrices(matrix):
            linked = (mixing != 0) | (mixing.T != 0)
            np.fill_diagonal(linked, False)
            rounds.append(metropolis_matrix([np.flatnonzero(row).tolist() for row in linked]))
        return cls(rounds)

    @property
    def ranks(self) -> int:
        """The number of ranks of the matrices."""
        return len(self.rounds[0])

    def period(self, size: int) -> int:
        """The number of matrices, without repetitions; 1 for one rank."""
        self.check(size)
        return len(self.rounds) if size > 1 else 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield what has a weight in the rank's row."""
        row = self.rounds[round % len(self.rounds)][rank]
        return ((peer, weight) for peer, weight in enumerate(row) if weight)

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        """The other ranks with a weight in the rank's column."""
        self.weights(rank, size, round)  # checks the arguments
        if size == 1:
            return ()
        rows = self.rounds[round % len(self.rounds)]
        return tuple(peer for peer, row in enumerate(rows) if row[rank] and peer != rank)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        lists = [[list(row) for row in mixing] for mixing in self.rounds]
        period, ranks = len(lists), self.ranks
        rounds = f"{period} rounds" if period > 1 else "1 round"
        return self._shown(period * ranks**2, lists if period > 1 else lists[0], f"{ranks} ranks, {rounds}")


@dataclass(frozen=True, init=False, repr=False)
class FromGraph(_Given):
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

    Xiao and Boyd 2004, "Fast linear iterations for distributed averaging", Systems & Control Letters 53.
    """

    edges: tuple[tuple[int, int], ...]

    def __init__(self, graph: Any, order: Iterable[Hashable] | None = None) -> None:
        nodes, pairs = _nodes_and_edges(graph)
        rank = _ranks(nodes, order)
        try:
            numbered = {(rank[a], rank[b]) for a, b, *_ in pairs}
        except KeyError as unknown:
            raise ValueError(f"an edge ends at {unknown.args[0]!r}, which is no node of the graph") from None
        edges = sorted({(min(edge), max(edge)) for edge in numbered if edge[0] != edge[1]})
        object.__setattr__(self, "edges", tuple(edges))
        _check_connected(nodes, rank, self.edges)

    @property
    def ranks(self) -> int:
        """The number of nodes."""
        return 1 + max((high for _, high in self.edges), default=0)

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield the rank and its neighbours in the graph."""
        near = (rank, *self._neighbors[rank])
        return metropolis(rank, {peer: 1 + len(self._neighbors[peer]) for peer in near})

    def symmetric(self, size: int) -> bool:
        """True: the graph is undirected."""
        self.check(size)
        return True

    @cached_property
    def _neighbors(self) -> list[list[int]]:
        return _neighbors(self.ranks, self.edges)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return self._shown(2 * len(self.edges), list(self.edges), f"{self.ranks} ranks, {len(self.edges)} edges")
