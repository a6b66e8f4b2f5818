"""One-peer topologies: one message per rank and round, to a peer that changes from round to round."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from .base import Topology


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """In round t each rank hears the one 2^(t mod τ) places back, τ = ⌈log₂ n⌉:  W = (I + S^(2^(t mod τ))) / 2.

    S shifts by one place. One message per rank; for n = 2^k any τ consecutive rounds give the exact mean, whichever
    comes first, since ∏ (I + S^(2^k)) / 2 = Σ S^j / n and shifts commute. Otherwise the mean is approached but never
    reached. Period τ, doubly stochastic, symmetric and static for n ≤ 2 only.

    Ying et al. 2021, "Exponential Graph is Provably Efficient for Decentralized Deep Training", arXiv 2110.13363;
    Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning", arXiv 1811.10792.
    """

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

    def doubly_stochastic(self, size: int) -> bool:
        """True: half the identity and half a permutation."""
        self.check(size)
        return True

    def _distance(self, size: int, round: int) -> int:
        return 1 << (round % self.period(size))


@dataclass(frozen=True)
class _Pairs(Topology):
    """Ranks that meet in pairs:  W = (I + P) / 2,  P a permutation that undoes itself."""

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield the rank and its peer of this round, ½ each."""
        yield rank, 1 / 2
        yield self._peer(rank, size, round), 1 / 2

    def symmetric(self, size: int) -> bool:
        """True: both of a pair hear each other."""
        self.check(size)
        return True

    def doubly_stochastic(self, size: int) -> bool:
        """True: half the identity and half a permutation."""
        self.check(size)
        return True

    @abstractmethod
    def _peer(self, rank: int, size: int, round: int) -> int: ...


@dataclass(frozen=True)
class Hypercube(_Pairs):
    """In round t rank i meets the rank whose number differs in bit t:  peer = i XOR 2^(t mod log₂ n).

    The group is a cube of log₂ n dimensions and each round averages along one of them, so any log₂ n consecutive
    rounds give the exact mean, whichever comes first. Needs n = 2^k: pairs that share half and half reach the mean in
    finite time for no other n. Symmetric, doubly stochastic, period log₂ n, static for n ≤ 2 only.

    Shi, Li, Johansson and Johansson 2016, "Finite-Time Convergent Gossiping", arXiv 1206.0992.
    """

    def check(self, size: int) -> None:
        """Raise ValueError unless `size` is a power of two."""
        super().check(size)
        if size & (size - 1):
            raise ValueError(
                f"Hypercube pairs ranks by the bits of their numbers and this group has {size}, which is no power of "
                f"two; use OnePeerExponential() or Ring()"
            )

    def period(self, size: int) -> int:
        """log₂ n, and 1 for one rank."""
        self.check(size)
        return max(1, (size - 1).bit_length())

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

    Gan et al. 2021, "BAGUA: Scaling up Distributed Learning with System Relaxations", arXiv 2107.01499.
    """

    def check(self, size: int) -> None:
        """Raise ValueError if `size` is odd; one rank alone is allowed."""
        super().check(size)
        if size % 2 and size > 1:
            raise ValueError(f"ShiftOne pairs ranks off and this group has {size}; use OnePeerExponential() or Ring()")

    def period(self, size: int) -> int:
        """n/2, and 1 for one rank."""
        self.check(size)
        return max(1, size // 2)

    def _peer(self, rank: int, size: int, round: int) -> int:
        half = size // 2
        return half + (rank + round) % half if rank < half else (rank - half - round) % half
