"""The topology of given mixing matrices."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arguments import shown
from ..metropolis import metropolis_matrix
from .base import Given

Matrix = tuple[tuple[float, ...], ...]

_ROUNDING = 1e-6  # the error of single precision; a matrix with a larger one is refused


@dataclass(frozen=True, init=False, repr=False)
class FromMatrix(Given):
    """A given mixing matrix, or one for each round of a period:  x ← W_{t mod τ} x,  row i holds the weights of rank i.

        FromMatrix([[0.75, 0.25], [0.25, 0.75]])          FromMatrix([first, second, third])

    Each matrix must be doubly stochastic. A sum may differ from 1 by 1e-6, the error of single precision: the weights
    are then corrected by about as much, so that sums are 1 to within 1e-15. A sequence that repeats itself is stored
    once. Period, symmetry and rounds to exactness follow from the matrices. Connectivity is not checked: if ranks do
    not all reach each other, `spectral_gap` is 0.

    It holds nested tuples, so that it can be compared, hashed and printed.

    Args:
        matrix: a square matrix, or a sequence of these for the rounds 0, 1, 2, …: lists, a numpy array, a CPU tensor.

    Raises:
        TypeError: `matrix` is neither a matrix nor a sequence of them.
        ValueError: a matrix is not square, has another size than the first, or is not doubly stochastic; the message
            names the worst row or column.
    """

    rounds: tuple[Matrix, ...]

    def __init__(self, matrix: Any) -> None:
        rounds = [_doubly_stochastic(mixing, where) for mixing, where in _matrices(matrix)]
        stored = tuple(tuple(tuple(map(float, row)) for row in mixing) for mixing in rounds)
        object.__setattr__(self, "rounds", stored[: _smallest_period(stored)])

    @classmethod
    def metropolis(cls, matrix: Any) -> "FromMatrix":
        """Return the topology with the graph of this matrix, or of each round, and Metropolis weights.

        Two ranks are neighbours if either has a weight for the other:
        W_ij = 1 / max(d_i, d_j), d_i the number of neighbours of i plus 1;  W_ii = 1 − Σ_j W_ij.
        """
        rounds = []
        for mixing, _ in _matrices(matrix):
            linked = (mixing != 0) | (mixing.T != 0)
            np.fill_diagonal(linked, False)
            rounds.append(metropolis_matrix([np.flatnonzero(row).tolist() for row in linked]))
        return cls(rounds)

    @property
    def ranks(self) -> int:
        return len(self.rounds[0])

    def period(self, size: int) -> int:
        """Return the number of matrices, without repetitions; 1 for one rank."""
        return len(self.rounds) if size > 1 else 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        row = self.rounds[round % len(self.rounds)][rank]
        return ((peer, weight) for peer, weight in enumerate(row) if weight)

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        if size == 1:
            return ()
        rows = self.rounds[round % len(self.rounds)]
        return tuple(peer for peer, row in enumerate(rows) if row[rank] and peer != rank)

    __hash__ = Given.__hash__  # not that of a dataclass

    def __repr__(self) -> str:
        lists = [[list(row) for row in mixing] for mixing in self.rounds]
        period, ranks = len(lists), self.ranks
        rounds = f"{period} rounds" if period > 1 else "1 round"
        return self._shown(period * ranks**2, lists if period > 1 else lists[0], f"{ranks} ranks, {rounds}")


def _matrices(given: Any) -> list[tuple[NDArray[np.float64], str]]:
    """Return each square matrix, and its name for error messages."""
    rounds = _arrays([given])
    if not rounds or rounds[0].ndim != 2:
        rounds = _arrays(given)
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


def _arrays(given: Any) -> list[NDArray[np.float64]]:
    """Return each as an array; [] if one is not made of numbers, or of rows of different lengths."""
    try:
        return [np.asarray(each, dtype=np.float64) for each in given]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return []


def _times(matrix: NDArray[np.float64]) -> str:
    return " × ".join(map(str, matrix.shape))


def _doubly_stochastic(mixing: NDArray[np.float64], where: str) -> NDArray[np.float64]:
    """Return the matrix, rounding errors corrected; raise ValueError if it is not doubly stochastic otherwise."""
    instead = "FromMatrix.metropolis(matrix) gives its graph Metropolis weights, which are doubly stochastic"
    for row, column in np.argwhere(~np.isfinite(mixing) | (mixing < -_ROUNDING))[:1]:
        weight = f"the weight {mixing[row, column]:.9g} in row {row}, column {column} of {where}"
        raise ValueError(f"{weight} is negative or not finite, and a mean has no such weights; {instead}")
    mixing = np.where(mixing > 0, mixing, 0.0)
    sums = line_sums(mixing)
    if is_doubly_stochastic(mixing):
        return mixing
    if np.abs(sums - 1).max() <= _ROUNDING:
        corrected = _corrected(mixing)
        if is_doubly_stochastic(corrected) and np.abs(corrected - mixing).max() <= 10 * _ROUNDING:
            return corrected
    size, worst = len(mixing), int(np.abs(sums - 1).argmax())
    line = f"row {worst}" if worst < size else f"column {worst - size}"
    raise ValueError(
        f"{line} of {where} sums to {sums[worst]:.9g}, not 1, so that the mean over the ranks would move; {instead}"
    )


def _corrected(mixing: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return W_ij (1 + u_i + v_j), with u and v such that rows and columns sum to 1, by three steps of Newton."""
    size, symmetric = len(mixing), np.array_equal(mixing, mixing.T)
    for _ in range(3):
        if is_doubly_stochastic(mixing):
            break
        sums = line_sums(mixing)
        system = np.diag(sums)
        system[:size, size:], system[size:, :size] = mixing, mixing.T
        change = np.linalg.lstsq(system, 1 - sums, rcond=None)[0]
        u, v = change[:size], change[size:]
        if symmetric:
            u = v = (u + v) / 2
        mixing = mixing * (1 + (u[:, None] + v))
    return mixing


def _smallest_period(rounds: tuple[Matrix, ...]) -> int:
    lengths = (length for length in range(1, len(rounds)) if len(rounds) % length == 0)
    return next((n for n in lengths if all(a == b for a, b in zip(rounds, rounds[n:], strict=False))), len(rounds))


def is_doubly_stochastic(mixing: NDArray[np.float64]) -> bool:
    """Return whether no weight is negative and every row and column sums to 1."""
    return bool((mixing >= 0).all()) and bool(np.abs(line_sums(mixing) - 1).max() <= 1e-15)


def line_sums(mixing: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums of the rows, then of the columns, each rounded once."""
    return np.array([fsum(line) for line in (*mixing, *mixing.T)])
