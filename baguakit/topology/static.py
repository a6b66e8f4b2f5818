"""Topologies whose matrix is the same in every round."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Annotated

from ..arguments import Declared, Range
from .base import Topology


@dataclass(frozen=True)
class FullyConnected(Topology):
    """The complete graph: each rank hears all others,  W = 11ᵀ/n.

    One round gives the exact mean, and each rank sends n − 1 messages. Symmetric, static, doubly stochastic.
    """

    facts = ("symmetric", "doubly_stochastic", "circulant")

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        return ((peer, 1 / size) for peer in range(size))


@dataclass(frozen=True)
class Ring(Topology):
    """A ring: each rank hears its two neighbours,  W_ii = W_i,i±1 = 1/3  (indices mod n).

    Each rank sends two messages for n > 2. Never exact for n > 3: a round multiplies the distance from the mean by
    1/3 + 2/3 cos(2π/n), 0.80 for 8 ranks, 0.987 for 32. W = 11ᵀ/2 for two. Symmetric, static, doubly stochastic.

    Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?" (D-PSGD), arXiv:1705.09056.
    """

    facts = ("symmetric", "doubly_stochastic", "circulant")

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        near = {(rank - 1) % size, rank, (rank + 1) % size}
        return ((peer, 1 / len(near)) for peer in near)


@dataclass(frozen=True)
class Exponential(Topology):
    """The static exponential graph: each rank hears the ranks 1, 2, 4, 8, … places back in every round.

        W_ii = W_i,i−2^k = 1/(1 + ⌈log₂ n⌉)

    ⌈log₂ n⌉ messages per rank. A round multiplies the distance from the mean by 1 − 2/(1 + ⌈log₂ n⌉), 0.5 for 8 ranks
    and 0.67 for 32; for odd n by less than this. Not exact for n > 3. Static, doubly stochastic; symmetric for n ≤ 3.

    Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv:2110.13363.
    """

    facts = ("doubly_stochastic", "circulant")

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        places = [0, *(1 << k for k in range((size - 1).bit_length()))]
        return (((rank - back) % size, 1 / len(places)) for back in places)

    def symmetric(self, size: int) -> bool:
        return self._ranks(size) <= 3


@dataclass(frozen=True, repr=False)
class SymmetricExponential(Declared, Topology):
    """The symmetric exponential graph: each rank hears the ranks 1, b, b², … places away on both sides.

        W_ij = 1/m   if the distance of i and j around the circle is 0 or a power of b,      m the number of such j

    About 2 log_b(n/2) messages per rank. A round multiplies the distance from the mean by 0.5 for 8 ranks and 0.75 for
    128 with b = 4, and by 0.33 and 0.71 with b = 2. Exact only if the graph is complete: for n ≤ 3, and for n ≤ 5 with
    b = 2. Static, symmetric, doubly stochastic.

    Args:
        base: b, 2 or more; a smaller base mixes faster and sends more.

    As in BlueFog: Ying et al. 2021, "BlueFog: Make Decentralized Algorithms Practical for Optimization and Deep
    Learning", arXiv:2111.04287.
    """

    base: Annotated[int, Range(2)] = 4
    facts = ("symmetric", "doubly_stochastic", "circulant")

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        near, places = {rank}, 1
        while 2 * places <= size:
            near |= {(rank + places) % size, (rank - places) % size}
            places *= self.base
        return ((peer, 1 / len(near)) for peer in near)


@dataclass(frozen=True)
class Star(Topology):
    """A star: rank 0 hears all others; they hear rank 0 only,  W_0j = W_j0 = 1/n,  W_jj = 1 − 1/n for j > 0.

    A round leaves 1 − 1/n of the distance from the mean. Never exact for n > 2. Symmetric, static, doubly stochastic.

    Metropolis weights: Xiao and Boyd 2004, "Fast linear iterations for distributed averaging",
    doi:10.1016/j.sysconle.2004.02.022.
    """

    facts = ("symmetric", "doubly_stochastic")  # neighbours hear each other; rows sum to 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        return metropolis(rank, lambda each: (each, 0) if each else range(size))


@dataclass(frozen=True)
class Grid2D(Topology):
    """A grid: each rank hears the ranks above, below, left and right of it, with Metropolis weights.

        rank = row · columns + column;     W_ij = 1 / max(d_i, d_j)  for neighbours,     W_ii = 1 − Σ_{j≠i} W_ij

    The grid is as square as n allows, with no more rows than columns. Rank i has d_i − 1 neighbours.
    A round multiplies the distance from the mean by 0.854 for 8 ranks, 0.869 for 16 and 0.968 for 64. For a prime
    n the grid is a path, which mixes slowly: 0.989 for 17. Never exact for n > 2. Symmetric, static, doubly stochastic.
    """

    facts = ("symmetric", "doubly_stochastic")  # neighbours hear each other; rows sum to 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        rows = next(rows for rows in range(isqrt(size), 0, -1) if size % rows == 0)
        columns = size // rows

        def near(rank: int) -> list[int]:
            row, column = divmod(rank, columns)
            places = ((row, column), (row - 1, column), (row, column - 1), (row, column + 1), (row + 1, column))
            return [r * columns + c for r, c in places if 0 <= r < rows and 0 <= c < columns]

        return metropolis(rank, near)


def metropolis(rank: int, near: Callable[[int], Collection[int]]) -> Iterator[tuple[int, float]]:
    """Yield row `rank` of  W_ij = 1 / max(d_i, d_j),  W_ii = 1 − Σ_{j≠i} W_ij,  d_i the length of `near(i)`.

    `near(i)` is rank i and its neighbours. W is symmetric and no weight is negative, so W is doubly stochastic.
    """
    own, among = Fraction(1), near(rank)
    for peer in among:
        if peer != rank:
            weight = Fraction(1, max(len(among), len(near(peer))))
            own -= weight
            yield peer, float(weight)
    yield rank, float(own)
