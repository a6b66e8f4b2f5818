"""Topologies whose matrix is the same in every round."""

from collections.abc import Iterator
from dataclasses import dataclass

from .base import Topology


@dataclass(frozen=True)
class FullyConnected(Topology):
    """Everyone hears everyone:  W = 11ᵀ/n.

    The exact mean in one round, and n − 1 messages sent by each rank: gossip's upper bound, in accuracy and in cost.
    Symmetric, static, doubly stochastic.
    """

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield every rank with weight 1/n."""
        return ((peer, 1 / size) for peer in range(size))

    def symmetric(self, size: int) -> bool:
        self.check(size)
        return True

    def doubly_stochastic(self, size: int) -> bool:
        self.check(size)
        return True


@dataclass(frozen=True)
class Ring(Topology):
    """Each rank hears its two neighbours:  W_ii = W_i,i±1 = 1/3  (indices mod n).

    Two messages per rank, whatever n is, and never the exact mean for n > 3: a round shrinks the distance from it by
    1/3 + 2/3 cos(2π/n), which is 0.80 for 8 ranks and 0.987 for 32. With two ranks both neighbours are the same one
    and W = 11ᵀ/2; adding the two entries instead would give (1/3, 2/3), which only takes longer to agree.
    Symmetric, static, doubly stochastic.

    Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms?" (D-PSGD), arXiv 1705.09056.
    """

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield the rank and its neighbours with equal weights."""
        near = {(rank - 1) % size, rank, (rank + 1) % size}
        return ((peer, 1 / len(near)) for peer in near)

    def symmetric(self, size: int) -> bool:
        self.check(size)
        return True

    def doubly_stochastic(self, size: int) -> bool:
        self.check(size)
        return True


@dataclass(frozen=True)
class Exponential(Topology):
    """Each rank hears those 1, 2, 4, 8, … places back, all in one round:  W_ii = W_i,i−2^k = 1/(1 + ⌈log₂ n⌉).

    ⌈log₂ n⌉ messages per rank. For even n a round shrinks the distance from the mean by 1 − 2/(1 + ⌈log₂ n⌉), for odd
    n by more: 0.5 for 8 ranks and 0.67 for 32, where the ring has 0.987. Not exact for n > 3.
    Static, doubly stochastic, and symmetric for n ≤ 3 only.

    Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv 2110.13363.
    """

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

    def doubly_stochastic(self, size: int) -> bool:
        """True: every row is the one above it, shifted."""
        self.check(size)
        return True


def _powers_of_two(size: int) -> list[int]:
    """1, 2, 4, … below `size`: ⌈log₂ size⌉ of them."""
    return [1 << k for k in range((size - 1).bit_length())]
