"""The base of all topologies."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import cos, fsum, pi, sin
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import checked, whole
from ..expressions import expression

if TYPE_CHECKING:  # matplotlib is needed to draw, and by nothing else
    from matplotlib.figure import Figure

CHECKED = {"check", "period", "weights", "targets", "matrix", "static", "symmetric", "doubly_stochastic"}
CHECKED |= {"column_stochastic", "rounds_to_exactness", "spectral_gap", "layout", "draw"}
MOST_RANKS = 1 << 20  # in a group: who asks for more has made a mistake, and would wait for ever
# Products of rounds end at the mean up to this, if they end there; what comes this close and no closer only converges.
_AT_THE_MEAN, _NEAR_THE_MEAN = 1e-13, 1e-8


@dataclass(frozen=True)
class Topology(ABC):
    """A mixing matrix for every group size and every round, asked for row by row.

    A new topology is a frozen dataclass with `links`; where its rounds differ it also says its `period`, and where a
    group size is impossible, `check` says so. The other methods follow from these two. They read the matrices, which
    is right and slow: a topology that knows an answer in closed form overrides them.

    Attributes:
        facts: those of "symmetric", "doubly_stochastic" and "column_stochastic" that hold for every size.

    `round` is the ordinal of the exchange, 0, 1, 2 …, equal on all ranks. It is never optional: a time-varying
    topology asked for the same round again and again would never mix. A rank, a size or a round that there cannot be
    raises a ValueError.
    """

    facts: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        """Check what the methods of every topology are given, once for all of them; NumPy's numbers become Python's."""
        for name in CHECKED & vars(cls).keys():
            setattr(cls, name, checked(vars(cls)[name], like=getattr(Topology, name)))

    @abstractmethod
    def links(self, rank: int, size: int, round: int) -> Iterable[tuple[int, float]]:
        """Yield (peer, weight) for what `rank` hears, itself included; a peer met twice is yielded twice.

        Called with arguments already checked, and with at least two ranks.
        """

    def check(self, size: int) -> None:
        """Raise ValueError, naming what to use instead, if a group of `size` ranks is impossible."""
        whole("size", size, 1, MOST_RANKS)

    def period(self, size: int) -> int:
        """The number of rounds after which the matrices repeat; 1 if they are all the same."""
        self.check(size)
        return 1

    def weights(self, rank: int, size: int, round: int) -> dict[int, float]:
        """Row `rank` of the mixing matrix, {peer: weight}: what `rank` hears, itself included.

        Peers come in rising order. Ranks that hear the same peers then add them in the same order, so that their
        means are equal bit for bit.
        """
        self.check(size)
        whole("rank", rank, 0, size - 1)
        whole("round", round, 0)
        if size == 1:
            return {0: 1.0}
        row: dict[int, float] = {}
        for peer, weight in sorted(self.links(rank, size, round)):
            row[peer] = row.get(peer, 0.0) + weight
        return row

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        """The other ranks that hear from `rank`, in rising order: to whom it sends."""
        if self.symmetric(size):
            hearers = self.weights(rank, size, round)
        else:
            hearers = {peer: 0.0 for peer in range(size) if rank in self.weights(peer, size, round)}
        return tuple(peer for peer in hearers if peer != rank)

    def matrix(self, size: int, round: int) -> NDArray[np.float64]:
        """The mixing matrix W of one round, (size, size): x ← W x, one row per rank."""
        self.check(size)
        whole("round", round, 0)
        mixing = np.zeros((size, size))
        for rank in range(size):
            for peer, weight in self.weights(rank, size, round).items():
                mixing[rank, peer] = weight
        return mixing

    def static(self, size: int) -> bool:
        """Whether every round has the same matrix."""
        return self.period(size) == 1

    def symmetric(self, size: int) -> bool:
        """Whether Wᵀ = W in every round: whoever hears is heard, with the same weight."""
        self.check(size)
        if "symmetric" in self.facts:
            return True
        rounds = (self.matrix(size, round) for round in range(self.period(size)))
        return all(np.array_equal(mixing, mixing.T) for mixing in rounds)

    def doubly_stochastic(self, size: int) -> bool:
        """Whether rows and columns sum to 1 and no weight is negative, in every round: then the mean is kept."""
        self.check(size)
        if "doubly_stochastic" in self.facts:
            return True
        rounds = (self.matrix(size, round) for round in range(self.period(size)))
        return all(is_doubly_stochastic(mixing) for mixing in rounds)

    def column_stochastic(self, size: int) -> bool:
        """Whether columns sum to 1 and no weight is negative, in every round: then the sum over the ranks is kept."""
        self.check(size)
        if "column_stochastic" in self.facts or self.doubly_stochastic(size):
            return True
        rounds = (self.matrix(size, round) for round in range(self.period(size)))
        return all(bool((w >= 0).all()) and bool(np.abs(line_sums(w)[size:] - 1).max() <= 1e-15) for w in rounds)

    def rounds_to_exactness(self, size: int) -> int | None:
        """The fewest rounds m, counted from round 0, after which every rank has the exact mean: W_m−1 ⋯ W_1 W_0 = J.

        J = 11ᵀ/n. None if no number of rounds gives it; 0 for one rank.
        """
        self.check(size)
        if size == 1:
            return 0
        rounds = [self.matrix(size, round) for round in range(self.period(size))]
        # If the rounds of a period multiply to P, then P − J must vanish in some power, and so by the (n − 1)th.
        laps = 1 if self.static(size) and self.symmetric(size) else size - 1
        product = np.eye(size)
        for count in range(1, laps * len(rounds) + 1):
            product = rounds[(count - 1) % len(rounds)] @ product
            distance = np.abs(product - 1 / size).max()
            if distance <= _NEAR_THE_MEAN:
                return count if distance <= _AT_THE_MEAN else None
        return None

    def spectral_gap(self, size: int) -> float:
        """1 − ρ, where ρ is the factor by which one round shrinks the distance from the mean, at worst.

            ρ = ‖W_τ−1 ⋯ W_1 W_0 − J‖₂ ^ (1/τ),     τ the period, J = 11ᵀ/n

        If the matrix is always the same, ρ = ‖W − J‖₂. Otherwise it is the geometric mean over the rounds of one
        period: a single round of these may not shrink the distance at all. 1 means the exact mean within one period,
        0 that some distance stays for ever.

        Raises:
            ValueError: the matrices are not doubly stochastic, so that the mean itself would move.
        """
        if not self.doubly_stochastic(size):
            raise ValueError(f"{self!r} is not doubly stochastic for {size} ranks: it moves the mean that it seeks")
        period, exact = self.period(size), self.rounds_to_exactness(size)
        if exact is not None and exact <= period:
            return 1.0
        left = np.eye(size)
        for round in range(period):  # ∏ W − J = ∏ (W − J), which loses no digits when it is small
            left = (self.matrix(size, round) - 1 / size) @ left
        distance = float(np.linalg.norm(left, ord=2))
        return max(0.0, 1 - float(distance ** (1 / period)))

    def layout(self, size: int) -> list[tuple[float, float]]:
        """Where a drawing puts the ranks, (x, y): clockwise on a circle, rank 0 at the top."""
        self.check(size)
        return [(sin(2 * pi * rank / size), cos(2 * pi * rank / size)) for rank in range(size)]

    def draw(self, size: int, rounds: int | None = None) -> "Figure":
        """Draw who hears whom, and the mixing matrix, round by round.

        Args:
            size: the number of ranks.
            rounds: how many rounds to draw; by default one period, or its first eight.

        Returns:
            A `matplotlib.figure.Figure` that stands alone (no pyplot): `.savefig("ring.png")`. In a notebook it shows
            itself after `%matplotlib inline`.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: the group is impossible, or `rounds` is less than 1.
        """
        from .drawing import draw

        return draw(self, size, rounds)

    def __repr__(self) -> str:
        return expression(self)


for _name in CHECKED:
    setattr(Topology, _name, checked(getattr(Topology, _name)))


def is_doubly_stochastic(mixing: NDArray[np.float64]) -> bool:
    """Whether no weight is negative and every row and column sums to 1."""
    return bool((mixing >= 0).all()) and bool(np.abs(line_sums(mixing) - 1).max() <= 1e-15)


def line_sums(mixing: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of the rows, then of the columns."""
    # fsum rounds once: what it reports is the weights' own error, not that of adding them.
    return np.array([fsum(line) for line in (*mixing, *mixing.T)])
