"""The line through measured times of messages."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations

from ..costs import Line

NEAR = 0.25  # the noise of a time, in logarithms: points farther from a line are outliers


def fit(times: Mapping[int, Sequence[float]]) -> Line:
    """Return the line α + β b through measured times, for t_b the median of the times of b bytes.

    First, of the lines through two of the points (or through one, with α or β 0), that with the least

        Σ_b |log((α + β b)/t_b)|

    Small messages then count as much as large ones, and an outlier counts little. Then, over the points near that
    line, the β of the line that minimises

        Σ_b b ((α + β b)/t_b − 1)²

    because long messages are timed best, and β matters most for them; and for this β the α that minimises the same sum
    without the factor b.

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
    """Return the line of least squares with α ≥ 0 and β ≥ 0; None if the points do not determine both."""
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
