"""Topologies whose matrix is the same in every round."""

from collections.abc import Iterator
from dataclasses import dataclass

from ..arguments import integer
from .base import Topology


@dataclass(frozen=True)
class FullyConnected(Topology):
    """The complete graph: each rank hears all others,  W = 11ᵀ/n.

    One round gives the exact mean, and each rank sends n − 1 messages: the most accurate and the most expensive
    topology. Symmetric, static, doubly stochastic.
    """

    facts = ("symmetric", "doubly_stochastic", "circulant")

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        return ((peer, 1 / size) for peer in range(size))

    def rounds_to_exactness(self, size: int) -> int:
        """Return 1; 0 for one rank."""
        return int(size > 1)


@dataclass(frozen=True)
class Ring(Topology):
    """A ring: each rank hears its two neighbours,  W_ii = W_i,i±1 = 1/3  (indices mod n).

    Two messages per rank for every n. Never exact for n > 3: a round multiplies the distance from the mean by
    1/3 + 2/3 cos(2π/n), which is 0.80 for 8 ranks and 0.987 for 32. For two ranks W = 11ᵀ/2: the neighbour on both
    sides is the same rank and counts once, which mixes faster than counting it twice.
    Symmetric, static, doubly stochastic.

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

    ⌈log₂ n⌉ messages per rank. For even n a round multiplies the distance from the mean by 1 − 2/(1 + ⌈log₂ n⌉): 0.5
    for 8 ranks and 0.67 for 32, compared to 0.987 for the ring; for odd n by less. Not exact for n > 3.
    Static, doubly stochastic, and symmetric for n ≤ 3 only.

    Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv:2110.13363.
    """

    facts = ("doubly_stochastic", "circulant")

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        places = [0, *_powers_of_two(size)]
        return (((rank - back) % size, 1 / len(places)) for back in places)

    def symmetric(self, size: int) -> bool:
        return size <= 3


@dataclass(frozen=True, repr=False)
class SymmetricExponential(Topology):
    """The symmetric exponential graph: each rank hears the ranks 1, b, b², … places away on both sides.

        W_ij = 1/m   if the distance of i and j around the circle is 0 or a power of b,      m the number of such j

    About 2 log_b(n/2) messages per rank. It is symmetric, as difference compression and momentum corrections require;
    `Exponential` is not. A round multiplies the distance from the mean by 0.5 for 8 ranks and 0.75 for 128 with b = 4,
    and by 0.33 and 0.71 with b = 2. Exact only if the graph is complete: for n ≤ 3, and for n ≤ 5 with b = 2. Static,
    symmetric, doubly stochastic.

    Args:
        base: b, 2 or more; a smaller base mixes faster and sends more.

    Raises:
        ValueError: `base` is less than 2.

    As in BlueFog: Ying et al. 2021, "BlueFog: Make Decentralized Algorithms Practical for Optimization and Deep
    Learning", arXiv:2111.04287.
    """

    base: int = 4
    facts = ("symmetric", "doubly_stochastic", "circulant")

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", integer("base", self.base, 2))

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        near, places = {rank}, 1
        while 2 * places <= size:
            near |= {(rank + places) % size, (rank - places) % size}
            places *= self.base
        return ((peer, 1 / len(near)) for peer in near)


@dataclass(frozen=True)
class Star(Topology):
    """A star: rank 0 hears all others, which hear rank 0,  W_0j = W_j0 = 1/n,  W_jj = 1 − 1/n for j > 0.

    Every rank exchanges one message with rank 0, which limits both bandwidth and mixing: a round multiplies the
    distance from the mean by 1 − 1/n. Larger weights would mix faster, but would not preserve the mean: with equal
    weights in each row rank 0 would count for up to n/3 times its share. Never exact for n > 2.
    Symmetric, static, doubly stochastic.

    Metropolis weights of the star: Xiao and Boyd 2004, "Fast linear iterations for distributed averaging",
    doi:10.1016/j.sysconle.2004.02.022.
    """

    facts = ("symmetric", "doubly_stochastic")  # neighbours hear each other; rows sum to 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        if rank == 0:
            return ((peer, 1 / size) for peer in range(size))
        return iter([(0, 1 / size), (rank, (size - 1) / size)])

    def layout(self, size: int) -> list[tuple[float, float]]:
        """Return the places of a star: rank 0 in the middle of a circle of the others."""
        return [(0.0, 0.0), *(super().layout(size - 1) if size > 1 else [])]


def _powers_of_two(size: int) -> list[int]:
    """Return 1, 2, 4, … below `size`: ⌈log₂ size⌉ of them."""
    return [1 << k for k in range((size - 1).bit_length())]
