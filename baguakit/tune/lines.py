"""Links as straight lines: a message of b bytes takes α + β b seconds.

What exchanges take on a line, for n ranks, S bytes of values and messages of b bytes:

    a message to each of k neighbours      α + k β b                            posted together
    all-reduce, a ring                     2 (n − 1) α + 2 (n − 1)/n β S
    all-gather, a ring                     (n − 1) (α + β b)                    b bytes from each rank
    scattered and gathered                 2 (α + (n − 1) β b)                  shards of b bytes, each to its owner
                                                                                and from it to all

Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..arguments import check_fields, checked

NEAR = 0.25  # of a line, in logarithms: what noise does to a time


@dataclass(frozen=True)
class Line:
    """The cost of a message: α + β b seconds for b bytes.

    Attributes:
        alpha: α, seconds that any message takes.
        beta: β, seconds that each byte takes.
        busy: seconds of β for which the sending rank's own processor is at work, and so not free to compute.
    """

    alpha: float
    beta: float
    busy: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def seconds(self, b: float) -> float:
        """α + β b."""
        return self.alpha + self.beta * b

    @property
    def rate(self) -> float:
        """1/β, bytes a second; infinite for a line that costs nothing."""
        return 1 / self.beta if self.beta else float("inf")


FREE = Line(0.0, 0.0)


def ring(n: int) -> float:
    """2 (n − 1)/n: how often an all-reduce sends each byte."""
    return 2 * (n - 1) / n


def neighbors(line: Line, k: int, b: float) -> float:
    """Seconds of a message of b bytes to each of k neighbours, and one from each."""
    return line.alpha + k * line.beta * b if k else 0.0


def all_reduce(line: Line, n: int, S: float) -> float:
    """Seconds of the sum of S bytes over n ranks."""
    return 2 * (n - 1) * line.alpha + ring(n) * line.beta * S


def all_gather(line: Line, n: int, b: float) -> float:
    """Seconds in which n ranks tell each other b bytes each; a reduce-scatter to shards of b bytes takes as long."""
    return (n - 1) * line.seconds(b)


def scatter_gather(line: Line, n: int, b: float) -> float:
    """Seconds in which n ranks send shards of b bytes to their owners, and get as many back from each."""
    return 2 * (line.alpha + (n - 1) * line.beta * b)


def fit(times: Mapping[int, Sequence[float]]) -> Line:
    """The line α + β b through measured times, for t_b the median of the times of b bytes.

    First, of the lines through two of the points (or through one, with α or β 0), that with the least

        Σ_b |log((α + β b)/t_b)|

    so that small messages count as much as large ones, and a size that a burst of the network lets through, or that
    came late, for little. Then, over the points near that line, β such that some line with it minimises

        Σ_b b ((α + β b)/t_b − 1)²

    since long messages are timed best, and it is for them that β counts; and for this β the α that minimises the same
    sum without the factor b.

    Args:
        times: seconds by bytes, for two sizes at least.

    Raises:
        ValueError: fewer sizes, or one of them or a time is not positive.
    """
    points = [(float(b), statistics.median(each)) for b, each in times.items()]
    if len(points) < 2 or min(min(point) for point in points) <= 0:
        raise ValueError(f"a line goes through positive times of two positive sizes or more, not {dict(points)}")
    lines = [Line(t, 0.0) for _, t in points] + [Line(0.0, t / b) for b, t in points]
    lines += [line for p, q in combinations(points, 2) if (line := _through(p, q)) is not None]
    best = min(lines, key=lambda line: sum(abs(_off(line, b, t)) for b, t in points))
    near = [(b, t) for b, t in points if abs(_off(best, b, t)) < NEAR]
    return _least_squares(near) or best


def _off(line: Line, b: float, t: float) -> float:
    return math.log(line.seconds(b) / t)


def _through(p: tuple[float, float], q: tuple[float, float]) -> Line | None:
    beta = (q[1] - p[1]) / (q[0] - p[0])
    alpha = p[1] - beta * p[0]
    return Line(alpha, beta) if min(alpha, beta) >= 0 else None


def _least_squares(points: Sequence[tuple[float, float]]) -> Line | None:
    """Neither below 0; None where they cannot be told apart."""
    scale = max(b for b, _ in points)  # so that both unknowns are of one magnitude
    w = [math.sqrt(b / scale) for b, _ in points]
    a = [v / t for v, (_, t) in zip(w, points, strict=True)]
    x = [v * b / scale / t for v, (b, t) in zip(w, points, strict=True)]
    aa, ax, xx, aw, xw = _dot(a, a), _dot(a, x), _dot(x, x), _dot(a, w), _dot(x, w)
    determinant = aa * xx - ax * ax
    if len(points) < 3 or determinant <= 1e-12 * aa * xx:
        return None
    if aw * xx < xw * ax:
        return Line(0.0, xw / xx / scale)
    beta = max(0.0, (xw * aa - aw * ax) / determinant / scale)
    inverse = [1 / t for _, t in points]
    alpha = sum(u * (1 - beta * b * u) for u, (b, _) in zip(inverse, points, strict=True)) / _dot(inverse, inverse)
    return Line(max(0.0, alpha), beta)


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
