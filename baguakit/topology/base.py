"""What every topology can be asked."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import fsum

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Topology(ABC):
    """A mixing matrix for every group size and every round, asked for row by row.

    A new topology is a frozen dataclass with `links`; where its rounds differ it also says its `period`, and where a
    group size is impossible, `check` says so. The other methods follow from these two. They read the matrices, which
    is right and slow: a topology that knows an answer in closed form overrides them.

    `round` is the ordinal of the exchange, 0, 1, 2 …, equal on all ranks. It is never optional: a time-varying
    topology asked for the same round again and again would never mix.
    """

    @abstractmethod
    def links(self, rank: int, size: int, round: int) -> Iterable[tuple[int, float]]:
        """Yield (peer, weight) for what `rank` hears, itself included; a peer met twice is yielded twice.

        Called with arguments already checked, and with at least two ranks.
        """

    def check(self, size: int) -> None:
        """Raise ValueError, naming what to use instead, if a group of `size` ranks is impossible."""
        if size < 1:
            raise ValueError(f"a group has at least one rank, not {size}")

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
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not in a group of {size}; its ranks are 0 to {size - 1}")
        if round < 0:
            raise ValueError(f"rounds count from 0 and this one is {round}")
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
        rounds = (self.matrix(size, round) for round in range(self.period(size)))
        return all(np.array_equal(mixing, mixing.T) for mixing in rounds)

    def doubly_stochastic(self, size: int) -> bool:
        """Whether rows and columns sum to 1 and no weight is negative, in every round: then the mean is kept."""
        rounds = (self.matrix(size, round) for round in range(self.period(size)))
        return all(_is_doubly_stochastic(mixing) for mixing in rounds)


def _is_doubly_stochastic(mixing: NDArray[np.float64]) -> bool:
    # fsum rounds once: what it reports is the weights' own error, not that of adding them.
    sums = [fsum(line) for line in (*mixing, *mixing.T)]
    return bool((mixing >= 0).all()) and all(abs(total - 1) <= 1e-15 for total in sums)
