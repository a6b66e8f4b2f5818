"""One-peer topologies: one message per rank and round, to a peer that changes from round to round."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt

from ..arguments import whole
from .base import Topology


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """In round t each rank hears the one 2^(t mod τ) places back, τ = ⌈log₂ n⌉:  W = (I + S^(2^(t mod τ))) / 2.

    S shifts by one place. One message per rank; for n = 2^k any τ consecutive rounds give the exact mean, whichever
    comes first, since ∏ (I + S^(2^k)) / 2 = Σ S^j / n and shifts commute. Otherwise the mean is approached but never
    reached. Period τ, doubly stochastic, symmetric and static for n ≤ 2 only.

    Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv:2110.13363;
    Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning", arXiv:1811.10792.
    """

    facts = ("doubly_stochastic",)  # half the identity and half a permutation

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield the rank and its peer of this round, ½ each."""
        yield rank, 1 / 2
        yield (rank - self._distance(size, round)) % size, 1 / 2

    def period(self, size: int) -> int:
        """τ = ⌈log₂ n⌉, and 1 for one rank."""
        self.check(size)
        return max(1, (size - 1).bit_length())

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        """The rank 2^(t mod τ) places ahead."""
        self.weights(rank, size, round)  # checks the arguments
        return ((rank + self._distance(size, round)) % size,) if size > 1 else ()

    def symmetric(self, size: int) -> bool:
        """Whether n ≤ 2: only there is one place back one place ahead."""
        self.check(size)
        return size <= 2

    def rounds_to_exactness(self, size: int) -> int | None:
        """log₂ n, whichever round comes first, for n = 2^k; never otherwise."""
        self.check(size)
        return None if size & (size - 1) else size.bit_length() - 1

    def _distance(self, size: int, round: int) -> int:
        return 1 << (round % self.period(size))


@dataclass(frozen=True, repr=False)
class _Pairs(Topology):
    """Ranks that meet in pairs:  W = (I + P) / 2,  P a permutation that undoes itself.

    A rank that is its own peer keeps its values in that round.
    """

    facts = ("symmetric", "doubly_stochastic")  # both of a pair hear each other, half and half

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield the rank and its peer of this round, ½ each."""
        yield rank, 1 / 2
        yield self._peer(rank, size, round), 1 / 2

    @abstractmethod
    def _peer(self, rank: int, size: int, round: int) -> int: ...


@dataclass(frozen=True)
class Hypercube(_Pairs):
    """In round t rank i meets the rank whose number differs in bit t:  peer = i XOR 2^(t mod log₂ n).

    The group is a cube of log₂ n dimensions and each round averages along one of them, so any log₂ n consecutive
    rounds give the exact mean, whichever comes first. Needs n = 2^k: pairs that share half and half reach the mean in
    finite time for no other n. Symmetric, doubly stochastic, period log₂ n, static for n ≤ 2 only.

    Shi, Li, Johansson and Johansson 2016, "Finite-Time Convergent Gossiping", arXiv:1206.0992.
    """

    def check(self, size: int) -> None:
        """Raise ValueError unless `size` is a power of two."""
        super().check(size)
        if size & (size - 1):
            raise ValueError(
                f"Hypercube pairs ranks by the bits of their numbers and this group has {size}, which is no power of "
                f"two; use OnePeerExponential() or BaseK(1)"
            )

    def period(self, size: int) -> int:
        """log₂ n, and 1 for one rank."""
        self.check(size)
        return max(1, (size - 1).bit_length())

    def rounds_to_exactness(self, size: int) -> int:
        """log₂ n, whichever round comes first."""
        self.check(size)
        return size.bit_length() - 1

    def _peer(self, rank: int, size: int, round: int) -> int:
        return rank ^ (1 << (round % self.period(size)))


@dataclass(frozen=True)
class ShiftOne(_Pairs):
    """The lower half of the group meets the upper half, one place further on in each round.

        peer(r) = h + (r + t) mod h   for r < h,      (r − h − t) mod h   for r ≥ h,      h = n/2

    Everyone of one half has met everyone of the other after h rounds. The halves never mix within themselves except
    through the other, so that it is slow in large groups: after its h rounds the distance from the mean has shrunk to
    0 for n = 4, 0.35 for n = 8 and 0.57 for n = 16, where `Hypercube` is exact after 2, 3 and 4. Needs an even n.
    Symmetric, doubly stochastic, period h, static for n ≤ 2 only.

    Gan et al. 2021, "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv:2107.01499.
    """

    def check(self, size: int) -> None:
        """Raise ValueError if `size` is odd; one rank alone is allowed."""
        super().check(size)
        if size % 2 and size > 1:
            raise ValueError(
                f"ShiftOne pairs ranks off and this group has {size}; use OnePeerExponential() or BaseK(1)"
            )

    def period(self, size: int) -> int:
        """n/2, and 1 for one rank."""
        self.check(size)
        return max(1, size // 2)

    def rounds_to_exactness(self, size: int) -> int | None:
        """n/2 for n ≤ 4, and never for more."""
        self.check(size)
        return size // 2 if size <= 4 else None

    def _peer(self, rank: int, size: int, round: int) -> int:
        half = size // 2
        return half + (rank + round) % half if rank < half else (rank - half - round) % half


@dataclass(frozen=True, repr=False)
class RandomMatching(_Pairs):
    """In each round the ranks are paired off at random, anew, the same way on all ranks.

        rank order of round t = the ranks sorted by hash(seed, t, rank);    the first meets the second, the third the
        fourth, …;    W = (I + P) / 2

    Every matching is equally likely. With an odd n the last of the order stays idle: it sends nothing and keeps what
    it has. The squared distance from the mean shrinks in expectation by (n − 2) / (2(n − 1)) in each round, and by ½
    for odd n: whatever n is, a round halves it, and nobody knows the way by heart. The mean is approached and exact
    only by luck. Symmetric, doubly stochastic; the rounds do not repeat before 2^64 of them (one matrix for n ≤ 2).

    Args:
        seed: a whole number, of which 64 bits count; the same on all ranks.

    Raises:
        TypeError: `seed` is no whole number.

    Boyd, Ghosh, Prabhakar and Shah 2006, "Randomized gossip algorithms", IEEE Transactions on Information Theory 52.
    Between outer optimizers it makes NoLoCo: Kolehmainen et al. 2025, arXiv:2506.10911.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", whole("seed", self.seed, None))

    def period(self, size: int) -> int:
        """2^64, which is never, and 1 for n ≤ 2."""
        self.check(size)
        return 1 << 64 if size > 2 else 1

    def rounds_to_exactness(self, size: int) -> int | None:
        """n − 1 for n ≤ 2; for more nothing is promised."""
        self.check(size)
        return size - 1 if size <= 2 else None

    def spectral_gap(self, size: int) -> float:
        """1 − √(E ‖W x − x̄‖² / ‖x − x̄‖²): the root mean square over all matchings, for the rounds have no period."""
        self.check(size)
        if size == 1:
            return 1.0
        return 1 - sqrt(1 / 2 if size % 2 else (size - 2) / (2 * (size - 1)))

    def _peer(self, rank: int, size: int, round: int) -> int:
        return _matching(self.seed, size, round % self.period(size))[rank]


@lru_cache(maxsize=256)
def _matching(seed: int, size: int, round: int) -> tuple[int, ...]:
    """The peer of each rank; its own number for the idle one."""
    key = _hashed(_hashed(seed) + round)
    order = sorted(range(size), key=lambda rank: (_hashed(key + rank), rank))
    peers = list(range(size))
    for one, other in zip(order[::2], order[1::2], strict=False):
        peers[one], peers[other] = other, one
    return tuple(peers)


def _hashed(number: int) -> int:
    """64 well-mixed bits of any whole number (SplitMix64), the same in every process."""
    mask = (1 << 64) - 1
    z = (number + 1) * 0x9E3779B97F4A7C15 & mask
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
    z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
    return z ^ z >> 31
