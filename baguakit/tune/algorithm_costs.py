"""The costs of the stages of single algorithms; see `costs`.

stage                    w                                          q, beside copies
DCD, CHOCO               row(N) to each of k neighbours, in pieces  N (compress + (k + 1) decompress)
PushSum                  4 N to each of k neighbours
TrackedGradient          as NeighborMean, in fp32
AdamDirection            as CompressedMean, of the momentum: what it costs after the warm-up
OuterStep                as the inner stage, in fp32
LowRankMean(r)           all-reduces of m × r and of k × r values   what the products read and write
"""

from dataclasses import replace
from math import prod

from ..algorithms.diloco import OuterStep
from ..algorithms.gradient_tracking import TrackedGradient
from ..algorithms.low_precision import Gossip
from ..algorithms.power_sgd import LowRankMean
from ..algorithms.push_sum import PushSum
from ..algorithms.qadam import AdamDirection
from ..arguments import checked
from ..primitives.pieces import pieces_of
from ..stages import Mean
from .costs import FP32, Cost, Load, Place, compressed_mean, cost, degree, messages, neighbor_mean, piped
from .lines import neighbors


@cost.register
@checked
def _(stage: Gossip, load: Load, place: Place) -> Cost:
    n, N, c = place.ranks, load.values, stage.compressor
    if n == 1:
        return Cost()
    t, line, speed, b = stage.topology, place.link.exchange, place.network.codec(c), c.row_bytes(N)
    k = max(degree(t, n, round) for round in range(t.period(n)))
    q = N * (speed.compress + (k + 1) * speed.decompress) + place.copies(7 + 2 * k, FP32 * N).busy
    P = pieces_of(N, place.network.device == "cuda") if c.dense else 1
    return replace(piped(q, neighbors(line, k, b), line.busy * k * b, P), sent=k * b)


@cost.register
@checked
def _(stage: PushSum, load: Load, place: Place) -> Cost:
    n, S, t = place.ranks, FP32 * load.values, stage.topology
    if n == 1:
        return Cost()
    k = max(degree(t, n, round) for round in range(t.period(n)))
    return messages(k, S, place) + place.copies(6 + (k + 2) / 2, S)


@cost.register
@checked
def _(stage: TrackedGradient, load: Load, place: Place) -> Cost:
    wide = replace(load, value_bytes=max(FP32, load.value_bytes))
    return neighbor_mean(stage.topology, wide, place) + place.copies(7, wide.size)


@cost.register
@checked
def _(stage: AdamDirection, load: Load, place: Place) -> Cost:
    wide = replace(load, value_bytes=FP32)
    return compressed_mean(stage.compressor, wide, place) + place.copies(10, wide.size)


@cost.register
@checked
def _(stage: OuterStep, load: Load, place: Place) -> Cost:
    wide = replace(load, value_bytes=max(FP32, load.value_bytes))
    return cost(stage.inner, wide, place) + place.copies(11, wide.size)


@cost.register
@checked
def _(stage: LowRankMean, load: Load, place: Place) -> Cost:
    if place.ranks == 1:
        return Cost()
    matrices: list[tuple[int, int]] = [(s[0], prod(s[1:])) for s in load.shapes if len(s) > 1]
    vectors = load.values - sum(m * k for m, k in matrices)
    first = vectors + sum(min(stage.rank, m, k) * m for m, k in matrices)
    second = sum(min(stage.rank, m, k) * k for m, k in matrices)
    factors = cost(Mean(), Load(first), place) + cost(Mean(), Load(second), place)
    return factors + place.copies(6, FP32 * load.values)
