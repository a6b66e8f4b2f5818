"""Metropolis weights: a doubly stochastic matrix for any undirected graph, from the degrees of neighbours."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt

from ..arguments import integer
from .base import Topology


def metropolis(rank: int, degrees: dict[int, int]) -> Iterator[tuple[int, float]]:
    """Yield row `rank` of  W_ij = 1 / max(d_i, d_j),  W_ii = 1 − Σ_j W_ij,  from its degree and its neighbours'.

    A degree is the number of neighbours plus 1. W is symmetric and no weight is negative, so W is doubly stochastic.

    Xiao and Boyd 2004, "Fast linear iterations for distributed averaging", Systems & Control Letters 53.
    """
    own = Fraction(1)
    for peer, degree in degrees.items():
        if peer != rank:
            weight = Fraction(1, max(degrees[rank], degree))
            own -= weight
            yield peer, float(weight)
    yield rank, float(own)


def metropolis_matrix(hearers: Sequence[Collection[int]]) -> list[list[float]]:
    """Return the matrix of Metropolis weights of a graph, given as the neighbours of each rank."""
    size = len(hearers)
    matrix = []
    for rank, near in enumerate(hearers):
        row = dict(metropolis(rank, {peer: 1 + len(hearers[peer]) for peer in (*near, rank)}))
        matrix.append([row.get(peer, 0.0) for peer in range(size)])
    return matrix


@dataclass(frozen=True, repr=False)
class Grid2D(Topology):
    """A grid: each rank hears the ranks above, below, left and right of it, with Metropolis weights.

        rank = row · columns + column;     W_ij = 1 / max(d_i, d_j)  for neighbours,     W_ii = 1 − Σ_j W_ij

    d_i is the number of neighbours of rank i plus 1. At most four messages per rank. A round multiplies the distance
    from the mean by 0.854 for 8 ranks, 0.869 for 16 and 0.968 for 64. A grid of a prime n is a path, which mixes
    slowly: 0.989 for 17. Never exact for n > 2. Symmetric, static, doubly stochastic.

    Args:
        rows, columns: the shape of the grid; if only one is given, the other follows from n; by default the grid is as
            square as n allows, with no more rows than columns.

    Raises:
        ValueError: one of them is less than 1; or, when n is known, the ranks do not fill the grid.
    """

    rows: int | None = None
    columns: int | None = None
    facts = ("symmetric", "doubly_stochastic")  # neighbours hear each other; rows sum to 1

    def __post_init__(self) -> None:
        for name, count in (("rows", self.rows), ("columns", self.columns)):
            if count is not None:
                object.__setattr__(self, name, integer(name, count, 1))

    def check(self, size: int) -> None:
        """Raise ValueError if the ranks do not fill the given rows and columns; a group of one rank is allowed."""
        super().check(size)
        rows, columns = self.rows or 1, self.columns or 1
        if size > 1 and (size % (rows * columns) or (self.rows and self.columns and rows * columns != size)):
            given = " and ".join(f"{count} {name}" for name, count in vars(self).items() if count)
            raise ValueError(
                f"a grid of {given} cannot be filled with ranks when the group has {size}; use Grid2D() or BaseK(1)"
            )

    def shape(self, size: int) -> tuple[int, int]:
        """Return the numbers of rows and of columns."""
        self.check(size)
        if size == 1:
            return 1, 1
        if self.columns:
            return size // self.columns, self.columns
        rows = self.rows or _most_square(size)
        return rows, size // rows

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        shape = self.shape(size)
        near = (rank, *_beside(rank, *shape))
        return metropolis(rank, {peer: 1 + len(_beside(peer, *shape)) for peer in near})

    def layout(self, size: int) -> list[tuple[float, float]]:
        """Return the places of a grid: rows from the top, columns from the left."""
        rows, columns = self.shape(size)
        step = 2 / max(1, rows - 1, columns - 1)
        return [(step * (i % columns - (columns - 1) / 2), step * ((rows - 1) / 2 - i // columns)) for i in range(size)]


@lru_cache(maxsize=256)
def _most_square(size: int) -> int:
    """Return the number of rows of a grid that is as square as possible."""
    return next(rows for rows in range(isqrt(size), 0, -1) if size % rows == 0)


def _beside(rank: int, rows: int, columns: int) -> list[int]:
    row, column = divmod(rank, columns)
    places = ((row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column))
    return [r * columns + c for r, c in places if 0 <= r < rows and 0 <= c < columns]
