"""Topologies that change from round to round: with one peer per rank, or exact after finitely many rounds."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, isqrt, log, sqrt
from operator import itemgetter
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import Declared, Positive
from ..hashing import mixed
from .base import Topology


@dataclass(frozen=True, repr=False)
class _OnePeer(Topology):
    """A topology in which each rank hears one peer per round, or only itself:  W = (I + P) / 2,  P a permutation."""

    facts: ClassVar[tuple[str, ...]] = ("symmetric", "doubly_stochastic")  # for P² = I: ranks average in pairs

    def period(self, size: int) -> int:
        """Return ⌈log₂ `size`⌉; 1 for one rank."""
        return max(1, (self._ranks(size) - 1).bit_length())

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        yield rank, 1 / 2
        yield self._peer(rank, size, round), 1 / 2

    @abstractmethod
    def _peer(self, rank: int, size: int, round: int) -> int: ...


@dataclass(frozen=True)
class OnePeerExponential(_OnePeer):
    """The one-peer exponential graph: in round t each rank hears the rank 2^(t mod τ) places back, τ = ⌈log₂ n⌉.

        W = (I + S^(2^(t mod τ))) / 2,     S the shift by one place

    One message per rank. For n = 2^τ any τ consecutive rounds give the exact mean, because shifts commute, and
    ∏ (I + S^(2^t)) over t < τ is Σ S^j over j < n. For other n the values only approach the mean. Doubly stochastic.

    Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv:2110.13363;
    Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning", arXiv:1811.10792.
    """

    facts = ("doubly_stochastic", "circulant")

    def symmetric(self, size: int) -> bool:
        return self._ranks(size) <= 2

    def _peer(self, rank: int, size: int, round: int) -> int:
        return (rank - (1 << (round % self.period(size)))) % size


@dataclass(frozen=True)
class ShiftOne(_OnePeer):
    """Pairs of ranks, one from each half of the group. The upper half shifts by one place in each round.

        peer of rank r in round t:   h + (r + t) mod h   for r < h,      (r − h − t) mod h   for r ≥ h,      h = n/2

    Two ranks of one half never average directly, so mixing is slow in large groups: h rounds multiply the distance from
    the mean by 0 for n = 4, 0.35 for n = 8 and 0.57 for n = 16. For these n, `BaseK(1)` is exact after 2, 3 and 4
    rounds. Needs an even n. Symmetric, doubly stochastic.

    Gan et al. 2021, "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499.
    """

    def check(self, size: int) -> None:
        """Raise a ValueError if `size` is odd, except for 1."""
        super().check(size)
        if size % 2 and size > 1:
            raise ValueError(
                f"ShiftOne needs an even number of ranks and this group has {size}; use OnePeerExponential() or "
                "BaseK(1)"
            )

    def period(self, size: int) -> int:
        """Return `size`/2; 1 for one rank."""
        return max(1, self._ranks(size) // 2)

    def _peer(self, rank: int, size: int, round: int) -> int:
        half = size // 2
        return half + (rank + round) % half if rank < half else (rank - half - round) % half


@dataclass(frozen=True, repr=False)
class RandomMatching(Declared, _OnePeer):
    """Random pairs of ranks, new in each round. The two ranks of a pair average. All ranks find the same pairs.

        order of round t = the ranks sorted by hash(seed, t, rank);    the first and second rank of the order average,
        then the third and fourth, …;    W = (I + P) / 2,    P swaps the ranks of each pair

    All matchings are equally likely. For odd n the last rank of the order keeps its values. A round multiplies the
    expected squared distance from the mean by (n − 2) / (2(n − 1)) for even n, by ½ for odd n. Never exact for n > 2.
    Symmetric, doubly stochastic; the period is 2^64 (1 for n ≤ 2).

    Args:
        seed: a whole number, the same on all ranks; its lowest 64 bits are used.

    Boyd, Ghosh, Prabhakar and Shah 2006, "Randomized gossip algorithms", doi:10.1109/TIT.2006.874516. `diloco`
    over this topology is NoLoCo: Kolehmainen et al. 2025, "NoLoCo: No-all-reduce Low Communication Training Method for
    Large Models", arXiv:2506.10911.
    """

    seed: int = 0

    def period(self, size: int) -> int:
        """Return 2^64; 1 for one or two ranks."""
        return 1 << 64 if self._ranks(size) > 2 else 1

    def rounds_to_exactness(self, size: int) -> int | None:
        return size - 1 if self._ranks(size) <= 2 else None

    def spectral_gap(self, size: int) -> float:
        """Return 1 − √(E ‖W x − x̄‖² / ‖x − x̄‖²), with E the mean over all matchings W, and x̄ the mean of x."""
        if self._ranks(size) == 1:
            return 1.0
        return 1 - sqrt(1 / 2 if size % 2 else (size - 2) / (2 * (size - 1)))

    def _peer(self, rank: int, size: int, round: int) -> int:
        return int(_matching(self.seed, size, round % self.period(size))[rank])


@dataclass(frozen=True, repr=False)
class BaseK(Declared, Topology):
    """The Base-(k+1) graph: each rank averages with at most k others per round; exact after T(n) rounds, for every n.

    The rounds combine three ways of averaging, such that T(n) is smallest:

        mean      n ≤ k + 1: all ranks average in one round.                             T = 1
        product   n = ab: ranks average in blocks of a, then across the b blocks.        T = T(a) + T(b)
        split     n = am + r: am ranks, in blocks of m, average; so do the r other ranks;
                  in one round each other rank averages with one rank of each block,
                  weight m/n; then ranks average within each block.                      T = 1 + max(T(am) + T(m), T(r))

    A split gives the mean of all ranks, (am/n) B + (r/n) O, for B the mean of the blocks and O the mean of the others.
    The round between both turns O into this mean, and the mean of a block into B + (r/n) (O − B), which equals it.
    For n = 2^j and k = 1 the graph is the hypercube: in round t rank i averages with rank i XOR 2^(t mod j).

    T ≤ 2 log_{k+1} n + 2, and no more than in the paper's graph: with k = 1, T is 3 for 8 ranks, 6 for 9 (7 in the
    paper), 9 for 25 and 11 for 100. Some ranks are idle in some rounds. Symmetric, doubly stochastic. The mean is exact
    after T rounds that begin at a multiple of T.

    Args:
        k: the largest number of peers of a rank in one round, 1 or more.

    Takezawa, Sato, Bao, Niwa and Yamada 2023, "Beyond Exponential Graph: Communication-Efficient Topologies for
    Decentralized Learning via Finite-time Convergence", arXiv:2305.11420. There, a block has a power of k + 1 ranks.
    """

    k: Positive
    facts = ("symmetric", "doubly_stochastic")  # peers hear each other; rows sum to 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        own = Fraction(1)  # weights are fractions until here, so that each is rounded once
        for peer, weight in _peers(self.k, size, rank, round % self.period(size)).items():
            own -= weight
            yield peer, float(weight)
        yield rank, float(own)

    def period(self, size: int) -> int:
        """Return T(`size`); 1 for one rank."""
        return max(1, self.rounds_to_exactness(size))

    def rounds_to_exactness(self, size: int) -> int:
        """Return T(`size`); 0 for one rank."""
        return _fewest(self.k, self._ranks(size))[0]


@dataclass(frozen=True)
class OnePeerExact(Topology):
    """A topology with at most one peer per rank and round, exact after finitely many rounds for every n.

        OnePeerExponential()  for n = 2^k,  exact after log₂ n rounds;      BaseK(1)  otherwise

    `decentralized` uses it by default. Doubly stochastic; if symmetry is required, use BaseK(1).
    """

    facts = ("doubly_stochastic",)  # as both of them are

    def links(self, rank: int, size: int, round: int) -> Iterable[tuple[int, float]]:
        return self._for(size).links(rank, size, round)

    def period(self, size: int) -> int:
        return self._for(size).period(size)

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        return self._for(size).targets(rank, size, round)

    def symmetric(self, size: int) -> bool:
        return self._for(size).symmetric(size)

    def _for(self, size: int) -> Topology:
        return BaseK(1) if self._ranks(size) & (size - 1) else OnePeerExponential()


@lru_cache(maxsize=16)
def _matching(seed: int, size: int, round: int) -> NDArray[np.int64]:
    """Return the peer of each rank in a round; an idle rank is its own peer. For 16,384 ranks this takes 1 ms."""
    key = np.uint64(mixed(mixed(seed) + round))
    order = mixed(key + np.arange(size, dtype=np.uint64)).argsort(kind="stable")
    peers = np.arange(size)
    ones, others = order[: size - 1 : 2], order[1::2]
    peers[ones], peers[others] = others, ones
    return peers


@lru_cache(maxsize=1 << 16)
def _fewest(k: int, n: int) -> tuple[int, tuple[int, ...]]:
    """Return T(n) of `BaseK` and the way of averaging that reaches it: () mean, (a,) product, (a, m) split."""
    if n <= k + 1:
        return min(n - 1, 1), ()
    best: tuple[int, tuple[int, ...]] = 2 * n, ()  # more than any plan takes
    for a in range(2, isqrt(n) + 1):
        if n % a == 0 and (rounds := _fewest(k, a)[0] + _fewest(k, n // a)[0]) < best[0]:
            best = rounds, (a,)
    for m in _products_of_small(k + 1, n):  # other blocks are never faster
        for a in range(max(1, -(-n // m) - k), min(k, (n - 1) // m) + 1):  # at least one other, and at most k m
            parts = a * m, m, n - a * m
            # In T rounds a rank gets values of at most (k + 1)^T ranks, so T ≥ log_{k+1} of the number of ranks.
            blocks, block, others = [ceil(log(part, k + 1) - 1e-9) for part in parts]
            if 1 + max(blocks + block, others) < best[0]:
                blocks, block, others = [_fewest(k, part)[0] for part in parts]
                best = min(best, (1 + max(blocks + block, others), (a, m)), key=itemgetter(0))
    return best


def _products_of_small(largest: int, n: int) -> list[int]:
    """Return all m < n that are products of numbers up to `largest`: m ranks average in one round per factor."""
    found = new = {1}
    while new:
        new = {m * factor for m in new for factor in range(2, largest + 1) if m * factor < n} - found
        found = found | new
    return sorted(found)


def _peers(k: int, n: int, rank: int, round: int) -> dict[int, Fraction]:
    """Return {rank: weight} for the other ranks that `rank` hears in one of the T(n) rounds; {} for later rounds."""
    rounds, way = _fewest(k, n)
    if round >= rounds:
        return {}
    match way:
        case (a,):
            block, place = divmod(rank, a)
            if round < (within := _fewest(k, a)[0]):
                return {block * a + i: w for i, w in _peers(k, a, place, round).items()}
            return {i * a + place: w for i, w in _peers(k, n // a, block, round - within).items()}
        case (a, m):
            blocks, before = a * m, _fewest(k, a * m)[0]
            block, place = divmod(rank, m)
            if rank >= blocks and round == before:
                return {i * m + (rank - blocks) % m: Fraction(m, n) for i in range(a)}
            if rank >= blocks:
                among = _peers(k, n - blocks, rank - blocks, round - (round > before))
                return {blocks + i: w for i, w in among.items()}
            if round == before:
                return {other: Fraction(m, n) for other in range(blocks + place, n, m)}
            if round < before:
                return _peers(k, blocks, rank, round)
            return {block * m + i: w for i, w in _peers(k, m, place, round - before - 1).items()}
    return {i: Fraction(1, n) for i in range(n) if i != rank}
