"""The base of all topologies."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from math import fsum
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import integer
from ..expressions import expression
from .drawing import draw

if TYPE_CHECKING:  # matplotlib is optional: only drawings need it
    from matplotlib.figure import Figure

MOST_RANKS = 1 << 20  # a larger group is a mistake in the call, and its matrices would take for ever
# A product of rounds is exact below the first distance. One that stays between the two only converges.
_AT_THE_MEAN, _NEAR_THE_MEAN = 1e-13, 1e-8


@dataclass(frozen=True)
class Topology(ABC):
    """The base of topologies: a mixing matrix for every group size and every round, row by row.

    A new topology is a frozen dataclass with `links`. It overrides `period` if its rounds differ, and `check` if some
    group sizes are impossible. The other methods look at all ranks, which is slow: declare `facts`, and override
    methods that have a closed form.

    Attributes:
        facts: the properties among "symmetric", "doubly_stochastic", "column_stochastic" and "circulant" that hold for
            every size. Circulant: row i of each matrix is row 0, shifted by i places.

    `round` is the number of the exchange, 0, 1, 2 …, equal on all ranks. It has no default: a time-varying topology
    that is always given the same round never mixes. An impossible rank, size or round raises a ValueError.
    """

    facts: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def links(self, rank: int, size: int, round: int) -> Iterable[tuple[int, float]]:
        """Yield (peer, weight) for each rank that `rank` hears, itself included; the weights of one peer are added.

        The arguments have been checked, and there are at least two ranks.
        """

    def check(self, size: int) -> None:
        """Raise ValueError, which names an alternative, if a group of `size` ranks is impossible."""
        integer("size", size, 1, MOST_RANKS)

    def _ranks(self, size: int) -> int:
        """Return `size` as Python's number; raise if a group of that size is impossible."""
        self.check(size)
        return int(size)

    def _place(self, rank: int, size: int, round: int) -> tuple[int, int, int]:
        """Return the same as Python's numbers; raise if they are impossible."""
        size = self._ranks(size)
        return integer("rank", rank, 0, size - 1), size, integer("round", round, 0)

    def period(self, size: int) -> int:
        """Return the number of rounds after which the matrices repeat; 1 if they are all the same."""
        self.check(size)
        return 1

    def weights(self, rank: int, size: int, round: int) -> dict[int, float]:
        """Return row `rank` of the mixing matrix, {peer: weight}: the ranks that it hears, itself included, rising."""
        rank, size, round = self._place(rank, size, round)
        if size == 1:
            return {0: 1.0}
        row: dict[int, float] = {}
        for peer, weight in sorted(self.links(rank, size, round)):
            row[peer] = row.get(peer, 0.0) + weight
        return row

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        """Return the other ranks that hear `rank`, in rising order: it sends to them."""
        rank, size, round = self._place(rank, size, round)
        if "circulant" in self.facts:  # rank − d hears it if it hears rank + d
            hearers: Iterable[int] = sorted((2 * rank - peer) % size for peer in self.weights(rank, size, round))
        elif "symmetric" in self.facts:
            hearers = self.weights(rank, size, round)
        else:
            hearers = (peer for peer in range(size) if rank in self.weights(peer, size, round))
        return tuple(peer for peer in hearers if peer != rank)

    def matrix(self, size: int, round: int) -> NDArray[np.float64]:
        """Return the mixing matrix W of one round, (size, size): x ← W x, one row per rank."""
        mixing = np.zeros((self._ranks(size), size))
        for rank in range(size):
            row = self.weights(rank, size, round)
            mixing[rank, list(row)] = list(row.values())
        return mixing

    def static(self, size: int) -> bool:
        """Return whether every round has the same matrix."""
        return self.period(self._ranks(size)) == 1

    def symmetric(self, size: int) -> bool:
        """Return whether Wᵀ = W in every round: two ranks hear each other with the same weight."""
        return self._holds("symmetric", size, lambda mixing: bool((mixing == mixing.T).all()))

    def doubly_stochastic(self, size: int) -> bool:
        """Return whether in every round rows and columns sum to 1 and no weight is negative: W preserves the mean."""
        return self._holds("doubly_stochastic", size, has_unit_sums)

    def column_stochastic(self, size: int) -> bool:
        """Return whether in every round columns sum to 1 and no weight is negative: W preserves the sum."""
        self.check(size)
        unit_columns = partial(has_unit_sums, across=False)
        return "doubly_stochastic" in self.facts or self._holds("column_stochastic", size, unit_columns)

    def _holds(self, fact: str, size: int, holds: Callable[[NDArray[np.float64]], bool]) -> bool:
        """Return whether a property is declared in `facts`, or `holds` returns True for the matrix of every round."""
        self.check(size)
        return fact in self.facts or all(holds(self.matrix(size, round)) for round in range(self.period(size)))

    def rounds_to_exactness(self, size: int) -> int | None:
        """Return the smallest m such that rounds 0 … m − 1 give every rank the exact mean: W_m−1 ⋯ W_1 W_0 = J.

        J = 11ᵀ/n. None if no number of rounds gives it; 0 for one rank.
        """
        if (size := self._ranks(size)) == 1:
            return 0
        rounds = [self.matrix(size, round) for round in range(self.period(size))]
        # If any power of P − J is 0, for P the product of a period, the (n − 1)th power is.
        laps = 1 if self.static(size) and self.symmetric(size) else size - 1
        product = np.eye(size)
        for count in range(1, laps * len(rounds) + 1):
            product = rounds[(count - 1) % len(rounds)] @ product
            distance = np.abs(product - 1 / size).max()
            if distance <= _NEAR_THE_MEAN:
                return count if distance <= _AT_THE_MEAN else None
            if count == len(rounds) and np.abs(np.linalg.matrix_power(product, laps) - 1 / size).max() > _NEAR_THE_MEAN:
                break  # and rounds to come do not reach it
        return None

    def spectral_gap(self, size: int) -> float:
        """Return 1 − ρ, where a round multiplies the distance from the mean by at most ρ, on average over a period.

            ρ = ‖W_τ−1 ⋯ W_1 W_0 − J‖₂ ^ (1/τ),     τ the period, J = 11ᵀ/n

        1 means the exact mean within one period; 0 means that some distances never shrink.

        Raises:
            ValueError: the matrices are not doubly stochastic, so they do not preserve the mean.
        """
        if not self.doubly_stochastic(size := self._ranks(size)):
            raise ValueError(f"{self!r} is not doubly stochastic for {size} ranks: it does not preserve the mean")
        period, exact = self.period(size), self.rounds_to_exactness(size)
        if exact is not None and exact <= period:
            return 1.0
        left = np.eye(size)
        for round in range(period):  # ∏ W − J = ∏ (W − J), which keeps its precision when it is small
            left = (self.matrix(size, round) - 1 / size) @ left
        distance = float(np.linalg.norm(left, ord=2))
        return max(0.0, 1 - float(distance ** (1 / period)))

    def draw(self, size: int, rounds: int | None = None) -> "Figure":
        """Draw the graph and the mixing matrix of each round.

        Args:
            size: the number of ranks.
            rounds: the number of rounds to draw, 1 to 256; by default one period, at most 8.

        Returns:
            A `matplotlib.figure.Figure`, independent of pyplot: `.savefig("ring.png")`.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        period = self.period(size := self._ranks(size))
        count = min(period, 8) if rounds is None else integer("rounds", rounds, 1, 256)
        matrices = [self.matrix(size, round) for round in range(count)]
        return draw(repr(self), matrices, period, self.rounds_to_exactness(size))

    def __repr__(self) -> str:
        return expression(self)


def has_unit_sums(mixing: NDArray[np.float64], across: bool = True) -> bool:
    """Return whether no weight is negative and every column, and with `across` every row, sums to 1."""
    # fsum rounds once: the sum has the error of the weights, and none of the additions.
    lines = (*mixing.T, *mixing) if across else mixing.T
    return bool((mixing >= 0).all()) and all(abs(fsum(line) - 1) <= 1e-15 for line in lines)
