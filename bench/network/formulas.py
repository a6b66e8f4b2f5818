"""Bytes that a rank sends in a step, headers apart; n ranks, N values in fp32, all on one switch.

all-reduce                  2 (n − 1)/n · 4 N
compressed all-reduce       2 (n − 1)/n · c(N)               c: packed bytes
gossip                      4 N, or c(N), for each neighbour; where a round is the exact mean, an all-reduce
low rank                    2 (n − 1)/n · 4 (vectors + Σ rank (m + k))
sparse                      (n − 1) · c(N)
every H steps               1/H of it
"""

import math
from collections.abc import Sequence

from baguakit.compressors import Compressor
from baguakit.topology import Topology

Shapes = Sequence[Sequence[int]]
FP32 = 4


def count(shapes: Shapes) -> int:
    """N, the number of values."""
    return sum(math.prod(shape) for shape in shapes)


def ring(n: int) -> float:
    """2 (n − 1)/n: how often an all-reduce sends each byte."""
    return 2 * (n - 1) / n


def all_reduce(shapes: Shapes, n: int, value_bytes: int = FP32) -> float:
    """The mean of all values."""
    return ring(n) * value_bytes * count(shapes)


def compressed_all_reduce(shapes: Shapes, n: int, compressor: Compressor) -> float:
    """The mean of all values, compressed on both ways."""
    return 2 * (n - 1) * compressor.row_bytes(-(-count(shapes) // n))


def gossip(shapes: Shapes, n: int, topology: Topology, compressor: Compressor | None = None) -> float:
    """A message to each neighbour: the mean over ranks and over the rounds of a period."""
    size = FP32 * count(shapes) if compressor is None else compressor.row_bytes(count(shapes))
    rounds = range(topology.period(n))
    return sum(_gossip_round(shapes, n, topology, round, size, compressor is None) for round in rounds) / len(rounds)


def _gossip_round(shapes: Shapes, n: int, topology: Topology, round: int, size: int, exact: bool) -> float:
    if exact and (topology.matrix(n, round) == 1 / n).all():
        return all_reduce(shapes, n)
    return size * sum(len(topology.targets(rank, n, round)) for rank in range(n)) / n


def low_rank(shapes: Shapes, n: int, rank: int) -> float:
    """PowerSGD as `baguakit` has it: every matrix through its factors."""
    values = 0
    for shape in shapes:
        m, k = shape[0] if shape else 1, math.prod(shape[1:])
        values += min(rank, m, k) * (m + k) if len(shape) > 1 else math.prod(shape)
    return ring(n) * FP32 * values


def low_rank_where_it_pays(shapes: Shapes, n: int, rank: int, least_gain: float = 2) -> float:
    """PowerSGD as torch's hook has it: through factors only where they are `least_gain` times smaller."""
    values = 0
    for shape in shapes:
        m, k = shape[0] if shape else 1, math.prod(shape[1:])
        pays = len(shape) > 1 and (m + k) * rank * least_gain < m * k
        values += min(rank, m, k) * (m + k) if pays else math.prod(shape)
    return ring(n) * FP32 * values


def sparse(shapes: Shapes, n: int, compressor: Compressor) -> float:
    """Return the bytes of the values that a sparse compressor keeps, gathered by all."""
    return (n - 1) * compressor.row_bytes(count(shapes))
