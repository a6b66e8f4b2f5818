"""One-peer topologies: one message per rank and round, to a peer that changes every round."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import integer
from .base import Topology

_MASK = (1 << 64) - 1  # of whole numbers, to the bits that are hashed


@dataclass(frozen=True, repr=False)
class _OnePeer(Topology):
    """A topology in which each rank hears one peer a round:  W = (I + P) / 2,  P a permutation.

    A rank that is its own peer keeps its values in that round.
    """

    facts: ClassVar[tuple[str, ...]] = ("symmetric", "doubly_stochastic")  # for P² = I: ranks average in pairs

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        yield rank, 1 / 2
        yield self._peer(rank, size, round), 1 / 2

    @abstractmethod
    def _peer(self, rank: int, size: int, round: int) -> int: ...


@dataclass(frozen=True)
class OnePeerExponential(_OnePeer):
    """The one-peer exponential graph: in round t each rank hears the rank 2^(t mod τ) places back, τ = ⌈log₂ n⌉.

        W = (I + S^(2^(t mod τ))) / 2,     S the shift by one place

    One message per rank. For n = 2^k any τ consecutive rounds give the exact mean, in any order, since
    ∏ (I + S^(2^t)) / 2 = Σ S^j / n and shifts commute. For other n the values converge to the mean without reaching
    it. Period τ, doubly stochastic, symmetric and static for n ≤ 2 only.

    Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv:2110.13363;
    Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning", arXiv:1811.10792.
    """

    facts = ("doubly_stochastic", "circulant")

    def period(self, size: int) -> int:
        """Return τ = ⌈log₂ n⌉; 1 for one rank."""
        return max(1, (size - 1).bit_length())

    def symmetric(self, size: int) -> bool:
        return size <= 2

    def rounds_to_exactness(self, size: int) -> int | None:
        """Return log₂ n for n = 2^k; None for other n."""
        return None if size & (size - 1) else size.bit_length() - 1

    def _peer(self, rank: int, size: int, round: int) -> int:
        return (rank - (1 << (round % self.period(size)))) % size


@dataclass(frozen=True)
class Hypercube(_OnePeer):
    """The hypercube: in round t rank i averages with the rank whose number differs in one bit.

        peer = i XOR 2^(t mod log₂ n)

    The group is a cube of log₂ n dimensions and each round averages along one of them, so any log₂ n consecutive
    rounds give the exact mean, in any order. Needs n = 2^k: for other n averaging in pairs does not reach the mean in
    finite time. Symmetric, doubly stochastic, period log₂ n, static for n ≤ 2 only.

    Shi, Li, Johansson and Johansson 2016, "Finite-Time Convergent Gossiping", arXiv:1206.0992.
    """

    def check(self, size: int) -> None:
        """Raise ValueError unless `size` is a power of two."""
        super().check(size)
        if size & (size - 1):
            raise ValueError(
                f"Hypercube needs a power of two as the number of ranks and this group has {size}; "
                f"use OnePeerExponential() or BaseK(1)"
            )

    def period(self, size: int) -> int:
        """Return log₂ n; 1 for one rank."""
        return max(1, (size - 1).bit_length())

    def rounds_to_exactness(self, size: int) -> int:
        """Return log₂ n."""
        return size.bit_length() - 1

    def _peer(self, rank: int, size: int, round: int) -> int:
        return rank ^ (1 << (round % self.period(size)))


@dataclass(frozen=True)
class ShiftOne(_OnePeer):
    """Pairs of the lower and the upper half of the group, shifted by one place in each round.

        peer(r) = h + (r + t) mod h   for r < h,      (r − h − t) mod h   for r ≥ h,      h = n/2

    After h rounds each rank has averaged with every rank of the other half. Ranks of one half never average directly,
    so it is slow in large groups: h rounds multiply the distance from the mean by 0 for n = 4, 0.35 for n = 8 and 0.57
    for n = 16, while `Hypercube` is exact after 2, 3 and 4 rounds. Needs an even n.
    Symmetric, doubly stochastic, period h, static for n ≤ 2 only.

    Gan et al. 2021, "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499.
    """

    def check(self, size: int) -> None:
        """Raise ValueError if `size` is odd; a group of one rank is allowed."""
        super().check(size)
        if size % 2 and size > 1:
            raise ValueError(
                f"ShiftOne needs an even number of ranks and this group has {size}; "
                f"use OnePeerExponential() or BaseK(1)"
            )

    def period(self, size: int) -> int:
        """Return n/2; 1 for one rank."""
        return max(1, size // 2)

    def rounds_to_exactness(self, size: int) -> int | None:
        """Return n/2 for n ≤ 4; None for more."""
        return size // 2 if size <= 4 else None

    def _peer(self, rank: int, size: int, round: int) -> int:
        half = size // 2
        return half + (rank + round) % half if rank < half else (rank - half - round) % half


@dataclass(frozen=True, repr=False)
class RandomMatching(_OnePeer):
    """A new random matching in each round, the same on all ranks.

        order of round t = the ranks sorted by hash(seed, t, rank);    the first and second rank of the order average,
        then the third and fourth, …;    W = (I + P) / 2

    All matchings are equally likely. For odd n the last rank of the order is idle: it sends nothing and keeps its
    values. A round multiplies the expected squared distance from the mean by (n − 2) / (2(n − 1)), and by ½ for odd n.
    The values converge to the mean, without a number of rounds that makes it exact. Symmetric, doubly stochastic; the
    period is 2^64 (1 for n ≤ 2).

    Args:
        seed: a whole number, the same on all ranks; its lowest 64 bits are used.

    Raises:
        TypeError: `seed` is not a whole number.

    Boyd, Ghosh, Prabhakar and Shah 2006, "Randomized gossip algorithms", doi:10.1109/TIT.2006.874516. With local steps
    and an outer optimizer, `diloco(50, inner=NeighborMean(RandomMatching(0)), lr=0.7, momentum=0.5)`, it is NoLoCo:
    Kolehmainen et al. 2025, "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
    arXiv:2506.10911.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", integer("seed", self.seed, None))

    def period(self, size: int) -> int:
        """Return 2^64; 1 for n ≤ 2."""
        return 1 << 64 if size > 2 else 1

    def rounds_to_exactness(self, size: int) -> int | None:
        """Return n − 1 for n ≤ 2; None for more."""
        return size - 1 if size <= 2 else None

    def spectral_gap(self, size: int) -> float:
        """Return 1 − √(E ‖W x − x̄‖² / ‖x − x̄‖²), the root mean square over all matchings."""
        if size == 1:
            return 1.0
        return 1 - sqrt(1 / 2 if size % 2 else (size - 2) / (2 * (size - 1)))

    def _peer(self, rank: int, size: int, round: int) -> int:
        return int(_matching(self.seed, size, round % self.period(size))[rank])


@lru_cache(maxsize=16)
def _matching(seed: int, size: int, round: int) -> NDArray[np.int64]:
    """Return the peer of each rank; an idle rank is its own peer.

    It is the only topology whose rounds need a look at all ranks: NumPy's, of 1 ms for 16,384 ranks.
    """
    key = _hashed(np.array([seed & _MASK], dtype=np.uint64)) + np.uint64(round & _MASK)
    numbers: NDArray[np.uint64] = _hashed(key) + np.arange(size).astype(np.uint64)
    order = _hashed(numbers).argsort(kind="stable")
    peers = np.arange(size)
    ones, others = order[: size - 1 : 2], order[1::2]
    peers[ones], peers[others] = others, ones
    return peers


def _hashed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 well-mixed bits of each number (SplitMix64), the same in every process."""
    z = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return z ^ z >> np.uint64(31)
