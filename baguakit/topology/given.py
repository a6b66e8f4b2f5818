"""Matrices of one's own, for one number of ranks."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arguments import shown
from ..expressions import formerly
from .base import Topology, is_doubly_stochastic, line_sums
from .metropolis import metropolis_matrix

Matrix = tuple[tuple[float, ...], ...]

# As far as single precision may be off; what is off by more was not meant to be doubly stochastic.
_ROUNDING = 1e-6
# A value with more entries than this prints a digest of them instead.
_SHORT = 64


class Given(Topology):
    """For one number of ranks. Large values are compared and hashed at every step: the hash is remembered."""

    facts = ("doubly_stochastic",)  # anything else is refused at the beginning

    @property
    @abstractmethod
    def ranks(self) -> int:
        """The number of ranks that this was given for."""

    def check(self, size: int) -> None:
        """Raise ValueError unless the group has as many ranks as this was given for; one rank alone is allowed."""
        super().check(size)
        if size not in (1, self.ranks):
            name = type(self).__name__
            raise ValueError(f"this {name} was given for {self.ranks} ranks and the group has {size}")

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, f.name) for f in fields(self)))

    @staticmethod
    def _edges(edges: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
        """The edges of a graph that prints; of one rank alone, a loop, which counts for nothing."""
        return list(edges) if edges or formerly() else [(0, 0)]

    def _shown(self, entries: int, contents: Any, summary: str) -> str:
        if entries > _SHORT:
            contents = f"<{summary}, sha256 {sha256(repr(contents).encode()).hexdigest()[:12]}>"
        return f"{type(self).__name__}({contents})"


@dataclass(frozen=True, init=False, repr=False)
class FromMatrix(Given):
    """The mixing matrix, or one for each round of a period:  x ← W_{t mod τ} x,  row i is what rank i hears.

        FromMatrix([[0.75, 0.25], [0.25, 0.75]])          FromMatrix([first, second, third])

    Each must be doubly stochastic, or it is refused, with its worst row or column. Sums may be off by what single
    precision is off by, 1e-6; the weights are then moved by about as much, so that they sum to 1 to 1e-15. A sequence
    that repeats itself is kept once. Period, symmetry and rounds to exactness are those of the matrices; whether all
    ranks are ever reached is left to `spectral_gap`, which is 0 if they are not.

    A value: it holds nested tuples, so that it compares, hashes and prints.

    Args:
        matrix: square, or a sequence of these for the rounds 0, 1, 2, …: lists, a numpy array, a tensor on the CPU.

    Raises:
        TypeError: this is no matrix and no sequence of them.
        ValueError: a matrix is not square, not of one size with the others, or not doubly stochastic.
    """

    rounds: tuple[Matrix, ...]

    def __init__(self, matrix: Any) -> None:
        rounds = [_doubly_stochastic(mixing, where) for mixing, where in _matrices(matrix)]
        stored = tuple(tuple(tuple(map(float, row)) for row in mixing) for mixing in rounds)
        object.__setattr__(self, "rounds", stored[: _smallest_period(stored)])

    @classmethod
    def metropolis(cls, matrix: Any) -> "FromMatrix":
        """The graph of this matrix, or of each round, with Metropolis weights, which are doubly stochastic.

        Two ranks are neighbours where either has a weight for the other, whatever the weight:
        W_ij = 1 / max(d_i, d_j), d the number of neighbours and the rank itself; W_ii = 1 − Σ_j W_ij.
        """
        rounds = []
        for mixing, _ in _matrices(matrix):
            linked = (mixing != 0) | (mixing.T != 0)
            np.fill_diagonal(linked, False)
            rounds.append(metropolis_matrix([np.flatnonzero(row).tolist() for row in linked]))
        return cls(rounds)

    @property
    def ranks(self) -> int:
        """The number of ranks of the matrices."""
        return len(self.rounds[0])

    def period(self, size: int) -> int:
        """The number of matrices, without repetitions; 1 for one rank."""
        self.check(size)
        return len(self.rounds) if size > 1 else 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield what has a weight in the rank's row."""
        row = self.rounds[round % len(self.rounds)][rank]
        return ((peer, weight) for peer, weight in enumerate(row) if weight)

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        """The other ranks with a weight in the rank's column."""
        self.weights(rank, size, round)  # checks the arguments
        if size == 1:
            return ()
        rows = self.rounds[round % len(self.rounds)]
        return tuple(peer for peer, row in enumerate(rows) if row[rank] and peer != rank)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        lists = [[list(row) for row in mixing] for mixing in self.rounds]
        period, ranks = len(lists), self.ranks
        rounds = f"{period} rounds" if period > 1 else "1 round"
        return self._shown(period * ranks**2, lists if period > 1 else lists[0], f"{ranks} ranks, {rounds}")


def _matrices(given: Any) -> list[tuple[NDArray[np.float64], str]]:
    """Each square matrix, and what to call it in an error."""
    try:
        rounds = [np.asarray(given, dtype=np.float64)]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        rounds = []  # of different shapes, or not numbers
    if not rounds or rounds[0].ndim != 2:
        try:
            rounds = [np.asarray(each, dtype=np.float64) for each in given]
        except (TypeError, ValueError, RuntimeError, OverflowError):
            rounds = []
    if not rounds or any(each.ndim != 2 for each in rounds):
        raise TypeError(
            f"FromMatrix takes a square matrix or a sequence of these, one for each round, not {shown(given)}"
        )
    for round, each in enumerate(rounds):
        if each.shape[0] != each.shape[1] or not each.size:
            raise ValueError(
                f"a mixing matrix has a row and a column for each rank; this one is {_times(each)}: {shown(given)}"
            )
        if each.shape != rounds[0].shape:
            raise ValueError(f"the matrix of round {round} is {_times(each)} and that of round 0 {_times(rounds[0])}")
    return [(each, "the matrix" + f" of round {t}" * (len(rounds) > 1)) for t, each in enumerate(rounds)]


def _times(matrix: NDArray[np.float64]) -> str:
    return " × ".join(map(str, matrix.shape))


def _doubly_stochastic(mixing: NDArray[np.float64], where: str) -> NDArray[np.float64]:
    """The matrix, its rounding mended; ValueError if more is wrong with it than rounding."""
    instead = "FromMatrix.metropolis(matrix) gives its graph Metropolis weights, which are doubly stochastic"
    for row, column in np.argwhere(~np.isfinite(mixing) | (mixing < -_ROUNDING))[:1]:
        weight = f"the weight {mixing[row, column]:.9g} in row {row}, column {column} of {where}"
        raise ValueError(f"{weight} is negative or not finite, and a mean has no such weights; {instead}")
    mixing = np.where(mixing > 0, mixing, 0.0)
    sums = line_sums(mixing)
    if is_doubly_stochastic(mixing):
        return mixing
    if np.abs(sums - 1).max() <= _ROUNDING:
        mended = _mended(mixing)
        if is_doubly_stochastic(mended) and np.abs(mended - mixing).max() <= 10 * _ROUNDING:
            return mended
    size, worst = len(mixing), int(np.abs(sums - 1).argmax())
    line = f"row {worst}" if worst < size else f"column {worst - size}"
    raise ValueError(
        f"{line} of {where} sums to {sums[worst]:.9g}, not 1, so that the mean over the ranks would move; {instead}"
    )


def _mended(mixing: NDArray[np.float64]) -> NDArray[np.float64]:
    """W_ij (1 + u_i + v_j), with u and v such that rows and columns sum to 1: Newton's method on small errors."""
    size, symmetric = len(mixing), np.array_equal(mixing, mixing.T)
    for _ in range(3):
        if is_doubly_stochastic(mixing):
            break
        sums = line_sums(mixing)
        system = np.diag(sums)
        system[:size, size:], system[size:, :size] = mixing, mixing.T
        change = np.linalg.lstsq(system, 1 - sums)[0]
        u, v = change[:size], change[size:]
        if symmetric:
            u = v = (u + v) / 2
        mixing = mixing * (1 + (u[:, None] + v))
    return mixing


def _smallest_period(rounds: tuple[Matrix, ...]) -> int:
    lengths = (length for length in range(1, len(rounds)) if len(rounds) % length == 0)
    return next((n for n in lengths if all(a == b for a, b in zip(rounds, rounds[n:], strict=False))), len(rounds))
