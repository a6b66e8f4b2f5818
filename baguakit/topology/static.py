"""Topologies whose matrix is the same in every round."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import cos, pi, sin

from ..arguments import whole
from .base import Topology


@dataclass(frozen=True)
class FullyConnected(Topology):
    """Everyone hears everyone:  W = 11ᵀ/n.

    The exact mean in one round, and n − 1 messages sent by each rank: gossip's upper bound, in accuracy and in cost.
    Symmetric, static, doubly stochastic.
    """

    facts = ("symmetric", "doubly_stochastic")

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield every rank with weight 1/n."""
        return ((peer, 1 / size) for peer in range(size))

    def rounds_to_exactness(self, size: int) -> int:
        """1, and 0 for one rank."""
        self.check(size)
        return int(size > 1)


@dataclass(frozen=True)
class Ring(Topology):
    """Each rank hears its two neighbours:  W_ii = W_i,i±1 = 1/3  (indices mod n).

    Two messages per rank, whatever n is, and never the exact mean for n > 3: a round shrinks the distance from it by
    1/3 + 2/3 cos(2π/n), which is 0.80 for 8 ranks and 0.987 for 32. With two ranks both neighbours are the same one
    and W = 11ᵀ/2; adding the two entries instead would give (1/3, 2/3), which only takes longer to agree.
    Symmetric, static, doubly stochastic.

    Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?" (D-PSGD), arXiv:1705.09056.
    """

    facts = ("symmetric", "doubly_stochastic")  # whom a rank hears, hears it; every row is the one above it, shifted

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield the rank and its neighbours with equal weights."""
        near = {(rank - 1) % size, rank, (rank + 1) % size}
        return ((peer, 1 / len(near)) for peer in near)


@dataclass(frozen=True)
class Exponential(Topology):
    """Each rank hears those 1, 2, 4, 8, … places back, all in one round:  W_ii = W_i,i−2^k = 1/(1 + ⌈log₂ n⌉).

    ⌈log₂ n⌉ messages per rank. For even n a round shrinks the distance from the mean by 1 − 2/(1 + ⌈log₂ n⌉), for odd
    n by more: 0.5 for 8 ranks and 0.67 for 32, where the ring has 0.987. Not exact for n > 3.
    Static, doubly stochastic, and symmetric for n ≤ 3 only.

    Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv:2110.13363.
    """

    facts = ("doubly_stochastic",)  # every row is the one above it, shifted

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield the rank and those 2^k < n places back, with equal weights."""
        places = [0, *_powers_of_two(size)]
        return (((rank - back) % size, 1 / len(places)) for back in places)

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        """The ranks 2^k < n places ahead."""
        self.weights(rank, size, round)  # checks the arguments
        return tuple(sorted((rank + ahead) % size for ahead in _powers_of_two(size)))

    def symmetric(self, size: int) -> bool:
        """Whether n ≤ 3: there one step back is two steps ahead, and everyone hears everyone."""
        self.check(size)
        return size <= 3


@dataclass(frozen=True, repr=False)
class SymmetricExponential(Topology):
    """Each rank hears those 1, b, b², … places away on both sides, all in one round, with equal weights.

        W_ij = 1/m   where the distance of i and j around the circle is 0 or a power of b,      m of these for each i

    About 2 log_b(n/2) messages per rank. Where `Exponential` is one-sided this is symmetric, which difference
    compression and momentum corrections ask for. A round shrinks the distance from the mean by 0.5 for 8 ranks and
    0.75 for 128 with b = 4, by 0.33 and 0.71 with b = 2. Not exact unless everyone hears everyone, as for n ≤ 3, and
    for n ≤ 5 with b = 2. Static, symmetric, doubly stochastic.

    Args:
        base: b, 2 or more; smaller ones mix faster and send more.

    Raises:
        ValueError: `base` is less.

    As in BlueFog: Ying et al. 2021, "BlueFog: Make Decentralized Algorithms Practical for Optimization and Deep
    Learning", arXiv:2111.04287.
    """

    base: int = 4
    facts = ("symmetric", "doubly_stochastic")  # whom a rank hears, hears it; every row is the one above it, shifted

    def __post_init__(self) -> None:
        object.__setattr__(self, "base", whole("base", self.base, 2))

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield the rank and those b^k ≤ n/2 places away, with equal weights."""
        near, places = {rank}, 1
        while 2 * places <= size:
            near |= {(rank + places) % size, (rank - places) % size}
            places *= self.base
        return ((peer, 1 / len(near)) for peer in near)


@dataclass(frozen=True)
class Star(Topology):
    """Rank 0 hears everyone, and everyone hears rank 0:  W_0j = W_j0 = 1/n,  W_jj = 1 − 1/n for j > 0.

    One message each way for a rank, and n − 1 for rank 0, which is the bottleneck of bandwidth and of mixing: a round
    shrinks the distance from the mean by 1 − 1/n only. It can be had faster only by giving up the mean: with equal
    weights in each row the centre would count for up to n/3 times its share. Never exact for n > 2.
    Symmetric, static, doubly stochastic.

    Metropolis weights of the star: Xiao and Boyd 2004, "Fast linear iterations for distributed averaging", Systems &
    Control Letters 53.
    """

    facts = ("symmetric", "doubly_stochastic")  # whom a rank hears, hears it; rows sum to 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield everyone for rank 0; rank 0 and the rank itself for the others."""
        if rank == 0:
            return ((peer, 1 / size) for peer in range(size))
        return iter([(0, 1 / size), (rank, (size - 1) / size)])

    def layout(self, size: int) -> list[tuple[float, float]]:
        """Rank 0 in the middle of a circle of the others."""
        self.check(size)
        around = [2 * pi * rank / max(1, size - 1) for rank in range(size - 1)]
        return [(0.0, 0.0), *((sin(angle), cos(angle)) for angle in around)]


def _powers_of_two(size: int) -> list[int]:
    """1, 2, 4, … below `size`: ⌈log₂ size⌉ of them."""
    return [1 << k for k in range((size - 1).bit_length())]
