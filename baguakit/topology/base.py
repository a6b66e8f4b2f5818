"""The base class of all topologies, and the functions that draw a topology."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import ceil, fsum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import integer
from ..expressions import expression

if TYPE_CHECKING:  # matplotlib is optional: only drawings need it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 1 << 20  # a larger group is a mistake in the call, and its matrices would take for ever
# The error of a product of mixing matrices is the largest difference of an entry from 1/n. An error up to the first
# number is rounding: the mean is exact. With an error between the two numbers, the rounds only approach the mean.
_AT_THE_MEAN, _NEAR_THE_MEAN = 1e-13, 1e-8
# Shades of one hue, from white to dark, are readable with any colour blindness, and in a grey print.
SHADES, INK = "Blues", "#0b3c6f"
MOST_ACROSS = 5
SMALL = 8  # up to this number of ranks weights are printed as fractions; above it a colour bar shows them


@dataclass(frozen=True)
class Topology(ABC):
    """The base class of topologies: a mixing matrix for every group size and every round.

    A new topology is a frozen dataclass and defines `links`. It overrides `period` if its rounds differ, and `check` if
    some group sizes are impossible. The other methods look at all ranks, which is slow. So declare `facts`, and
    override methods that have a closed form.

    Attributes:
        facts: the properties among "symmetric", "doubly_stochastic", "column_stochastic" and "circulant" that hold for
            every size. Circulant: row i of each matrix is row 0, shifted by i places.

    `round` is the number of the exchange, 0, 1, 2 …, equal on all ranks. It has no default: a time-varying topology
    that is always given the same round never mixes. An impossible rank, size or round raises a ValueError.
    """

    facts: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def links(self, rank: int, size: int, round: int) -> Iterable[tuple[int, float]]:
        """Yield (peer, weight) for each rank that `rank` hears, and for `rank`. Weights of the same peer are added.

        The arguments have been checked, and there are at least two ranks.
        """

    def check(self, size: int) -> None:
        """Raise a ValueError that names an alternative if a group of `size` ranks is impossible."""
        integer("size", size, 1, MOST_RANKS)

    def _ranks(self, size: int) -> int:
        """Return `size` as a Python int; raise if a group of that size is impossible."""
        self.check(size)
        return int(size)

    def _place(self, rank: int, size: int, round: int) -> tuple[int, int, int]:
        """Return rank, size and round as Python ints; raise if they are impossible."""
        size = self._ranks(size)
        return integer("rank", rank, 0, size - 1), size, integer("round", round, 0)

    def period(self, size: int) -> int:
        """Return the number of rounds after which the matrices repeat; 1 if they are all the same."""
        self.check(size)
        return 1

    def weights(self, rank: int, size: int, round: int) -> dict[int, float]:
        """Return row `rank` of the mixing matrix: {peer: weight} of `rank` and the ranks that it hears, sorted."""
        rank, size, round = self._place(rank, size, round)
        if size == 1:
            return {0: 1.0}
        row: dict[int, float] = {}
        for peer, weight in sorted(self.links(rank, size, round)):
            row[peer] = row.get(peer, 0.0) + weight
        return row

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        """Return the other ranks that hear `rank` (`rank` sends to them), in rising order."""
        rank, size, round = self._place(rank, size, round)
        if "circulant" in self.facts:  # rank − d hears it if it hears rank + d
            hearers: Iterable[int] = sorted((2 * rank - peer) % size for peer in self.weights(rank, size, round))
        elif "symmetric" in self.facts:
            hearers = self.weights(rank, size, round)
        else:
            hearers = (peer for peer in range(size) if rank in self.weights(peer, size, round))
        return tuple(peer for peer in hearers if peer != rank)

    def matrix(self, size: int, round: int) -> NDArray[np.float64]:
        """Return the mixing matrix W of a round, (size, size). The round computes x ← W x; x has one row per rank."""
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
        fact = "doubly_stochastic" if "doubly_stochastic" in self.facts else "column_stochastic"
        return self._holds(fact, size, partial(has_unit_sums, across=False))

    def _holds(self, fact: str, size: int, holds: Callable[[NDArray[np.float64]], bool]) -> bool:
        """Return whether a property is declared in `facts`, or `holds` returns True for the matrix of every round."""
        self.check(size)
        return fact in self.facts or all(holds(self.matrix(size, round)) for round in range(self.period(size)))

    def rounds_to_exactness(self, size: int) -> int | None:
        """Return the smallest m such that rounds 0 … m − 1 give every rank the exact mean: W_m−1 ⋯ W_1 W_0 = J.

        W_t is the matrix of round t; J = 11ᵀ/n for n ranks. Return None if the mean is never exact, 0 for one rank.
        """
        if (size := self._ranks(size)) == 1:
            return 0
        rounds = [self.matrix(size, round) for round in range(self.period(size))]
        # Let P be the product of the matrices of a period. If any power of P − J is 0, then (P − J)^(n − 1) is 0.
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

            ρ = ‖W_τ−1 ⋯ W_1 W_0 − J‖₂ ^ (1/τ),     τ the period, W_t the matrix of round t, J = 11ᵀ/n, n ranks

        A gap of 1 means the exact mean within one period. A gap of 0 means that some distances never shrink. Raises a
        ValueError if the matrices are not doubly stochastic.
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
        """Draw the graph and the mixing matrix of each round, in a matplotlib `Figure`, independent of pyplot.

        Args:
            size: the number of ranks.
            rounds: the number of rounds to draw, 1 to 256; by default one period, at most 8.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        period = self.period(size := self._ranks(size))
        count = min(period, 8) if rounds is None else integer("rounds", rounds, 1, 256)
        matrices = [self.matrix(size, round) for round in range(count)]
        try:
            from matplotlib.colors import PowerNorm
            from matplotlib.figure import Figure
        except ModuleNotFoundError as missing:
            raise ModuleNotFoundError("drawing a topology needs matplotlib: pip install matplotlib") from missing
        panel = 2.6 if size <= 16 else 3.4  # inches
        down = ceil(count / MOST_ACROSS)
        rows, columns = (1, 2) if count == 1 else (2 * down, ceil(count / down))
        figure = Figure(figsize=(1.1 * columns * panel, rows * panel + 0.8), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        graphs, tables = ([*axes[first::2].flat] if count > 1 else [axes[0, first]] for first in (0, 1))

        # A shade shows the square root of a weight, so that 1/n looks different from 0.
        shades = PowerNorm(0.5, vmin=0, vmax=1 if size <= SMALL else 1.2 * max(float(w.max()) for w in matrices))
        for axis in axes.flat:
            axis.set_axis_off()
        for round, (mixing, graph, table) in enumerate(zip(matrices, graphs, tables, strict=False)):
            graph.set_title(f"round {round}" if count > 1 else "", fontsize=10)
            _draw_graph(graph, mixing)
            image = _draw_matrix(table, mixing, shades)
        if size > SMALL:
            figure.colorbar(image, ax=tables[:count], shrink=0.75, label="weight", pad=0.02, format="%.2g")

        facts = f"first {count} rounds" + (f" of {period}" if period < 1 << 32 else "")
        if count >= period:
            facts = f"repeats after {period} rounds" if period > 1 else "the same in every round"
        if exact := self.rounds_to_exactness(size):
            facts += f" · exact after {exact}" if period > 1 else " · exact after one"
        name = repr(self) if len(repr(self)) <= 40 else f"{type(self).__name__}(…)"
        figure.suptitle(f"{name} on {size} rank{'s' * (size > 1)}\n{facts}", fontsize=11)
        return figure

    def __repr__(self) -> str:
        return expression(self)


def has_unit_sums(mixing: NDArray[np.float64], across: bool = True) -> bool:
    """Return whether no weight is negative and every column sums to 1; with `across`, every row must sum to 1, too."""
    # fsum rounds only once, so the sum is as exact as the weights.
    lines = (*mixing.T, *mixing) if across else mixing.T
    return bool((mixing >= 0).all()) and all(abs(fsum(line) - 1) <= 1e-15 for line in lines)


def _draw_graph(axes: "Axes", mixing: NDArray[np.float64]) -> None:
    """Draw ranks on a circle. Join two ranks by a line if they hear each other with equal weights, else by an arrow."""
    from matplotlib.collections import LineCollection
    from matplotlib.patches import Circle, FancyArrowPatch

    size = len(mixing)
    angles = 2 * np.pi * np.arange(size) / size
    places = np.stack([np.sin(angles), np.cos(angles)], axis=1)  # clockwise, rank 0 at the top
    radius = min(0.2, 0.56 * float(np.sin(np.pi / size))) if size > 1 else 0.2
    circles = [axes.add_patch(Circle(place, radius, facecolor="white", edgecolor=INK, zorder=2)) for place in places]
    for rank, (x, y) in enumerate(places if radius > 0.06 else []):
        axes.text(x, y, str(rank), fontsize=50 * radius, ha="center", va="center", color=INK)

    others = mixing - np.diag(np.diag(mixing))
    crowd = min(1.0, 50 / max(1, int(np.count_nonzero(others))))  # many edges are drawn thin and pale
    widths, alpha = (0.3 + 2.2 * others**0.5) * max(0.3, crowd), 0.35 + 0.65 * crowd
    mutual = (others != 0) & (others == others.T)
    i, j = np.nonzero(np.tril(mutual))
    lines = list(np.stack([places[i], places[j]], axis=1))
    axes.add_collection(LineCollection(lines, linewidths=widths[i, j], colors=INK, alpha=alpha, zorder=1))
    for hearer, heard in np.argwhere((others != 0) & ~mutual):
        ends: dict[str, Any] = {"patchA": circles[heard], "patchB": circles[hearer], "shrinkA": 0, "shrinkB": 0}
        look = {"arrowstyle": "-|>", "mutation_scale": 9 if size <= 16 else 6, "linewidth": widths[hearer, heard]}
        axes.add_patch(FancyArrowPatch(places[heard], places[hearer], color=INK, alpha=alpha, zorder=1, **ends, **look))
    axes.set(xlim=(-1.25, 1.25), ylim=(-1.25, 1.25), aspect="equal")


def _draw_matrix(axes: "Axes", mixing: NDArray[np.float64], shades: Any) -> Any:
    """Draw the weights of a mixing matrix as shades, and in a small matrix also as fractions; return the image."""
    size = len(mixing)
    axes.set_axis_on()
    ticks = range(0, size, ceil(size / 8))
    axes.set(xticks=ticks, yticks=ticks, xlabel="hears rank", ylabel="rank")
    axes.tick_params(length=0, labelsize=8)
    for i, j in np.argwhere(mixing).tolist() if size <= SMALL else ():
        near = Fraction(mixing[i, j]).limit_denominator(64)
        weight = str(near) if abs(near - Fraction(mixing[i, j])) < 1e-12 else f"{mixing[i, j]:.2f}"
        color = "white" if mixing[i, j] > 0.4 else "black"
        axes.text(j, i, weight, ha="center", va="center", color=color, fontsize=11 - 0.5 * size)
    return axes.imshow(mixing, cmap=SHADES, norm=shades)
