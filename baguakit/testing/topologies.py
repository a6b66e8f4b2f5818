"""Checks of topologies, read off their matrices. No processes."""

from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from math import fsum
from typing import Any

import numpy as np

from ..topology import Topology
from ..topology.base import has_unit_sums
from .checking import Checks, expression

TOPOLOGIES = Checks()
TOPOLOGIES.add("its repr is an expression that evaluates to an equal topology")(expression)
SIZES: Iterable[int] = (*range(1, 21), 32, 64)
MOST_ROUNDS = 64  # of a period whose rounds are all looked at; else the first few
columns = partial(has_unit_sums, across=False)


def periods(t: Topology) -> Iterator[tuple[int, list[Any]]]:
    """Yield (size, matrices of one period) for the sizes that a topology accepts."""
    for size in SIZES:
        try:
            t.check(size)
        except ValueError:
            continue
        yield size, one_period(t, size)


@lru_cache(maxsize=64)
def one_period(t: Topology, size: int) -> list[Any]:
    """Return the matrices of one period, or of the first rounds if it is long."""
    period = t.period(size)
    return [t.matrix(size, round) for round in range(period if period <= MOST_ROUNDS else 12)]


@TOPOLOGIES.add("no weight is negative, and the rows of each matrix sum to 1, or its columns do")
def weights(t: Topology) -> Iterator[str]:
    for size, matrices in periods(t):
        for round, w in enumerate(matrices):
            if not columns(w) and not columns(w.T):
                yield f"for {size} ranks those of the rows of round {round} are {[*map(fsum, w)]}"


@TOPOLOGIES.add("what it says of itself is what its matrices say")
def claims(t: Topology) -> Iterator[str]:
    for size, matrices in periods(t):
        for name, claimed, holds in (
            ("symmetric", t.symmetric(size), all((w == w.T).all() for w in matrices)),
            ("doubly_stochastic", t.doubly_stochastic(size), all(map(has_unit_sums, matrices))),
            ("column_stochastic", t.column_stochastic(size), all(map(columns, matrices))),
            ("static", t.static(size), all((w == matrices[0]).all() for w in matrices)),
            ("circulant", "circulant" in t.facts, all((w == np.roll(w, (1, 1), (0, 1))).all() for w in matrices)),
        ):
            if claimed != holds and not (name == "circulant" and holds):  # which need not be declared
                yield f"for {size} ranks it says {name}={claimed}, and its matrices say {holds}"


@TOPOLOGIES.add("period is the smallest number of rounds after which the matrices repeat, however late")
def period(t: Topology) -> Iterator[str]:
    for size, matrices in periods(t):
        rounds = t.period(size)
        if rounds == len(matrices):
            twice = [*matrices, *(t.matrix(size, round) for round in range(rounds, 2 * rounds))]
            shifts = (s for s in range(1, rounds + 1) if all((twice[r] == twice[r + s]).all() for r in range(rounds)))
            if (smallest := next(shifts, None)) != rounds:
                yield f"for {size} ranks it is {rounds}, and they repeat after {smallest or 'more'}"
        for round in range(len(matrices)):
            for later in (round + laps * rounds for laps in (1, 7, 10**30)):
                if any(ask(size - 1, size, later) != ask(size - 1, size, round) for ask in (t.weights, t.targets)):
                    yield f"for {size} ranks round {later} is not round {round}"


@TOPOLOGIES.add("weights are the rows of the matrix, sorted, and targets are the other ranks that hear a rank")
def matrix(t: Topology) -> Iterator[str]:
    for size, matrices in periods(t):
        for round, w in enumerate(matrices):
            for rank in range(size):
                row, hear = t.weights(rank, size, round), t.targets(rank, size, round)
                wanted = {peer: float(w[rank, peer]) for peer in np.flatnonzero(w[rank]).tolist()}
                hearers = tuple(peer for peer in np.flatnonzero(w[:, rank]).tolist() if peer != rank)
                if repr(row) != repr(wanted) or rank not in row or hear != hearers:
                    said = f"has the weights {row} and the targets {hear}, and the matrix says {wanted} and {hearers}"
                    yield f"for {size} ranks rank {rank} in round {round} {said}"


@TOPOLOGIES.add("every rank hears of every other within as many rounds as there are ranks, and a period")
def reaches(t: Topology) -> Iterator[str]:
    for size, matrices in periods(t):
        mixing, round = np.eye(size), 0
        while not (mixing > 0).all() and round < size + len(matrices):  # a positive product stays so: no row is zero
            mixing = (matrices[round] if round < len(matrices) else t.matrix(size, round)) @ mixing
            round += 1
        if not (mixing > 0).all():
            yield f"for {size} ranks rank {(mixing > 0).all(1).argmin()} has not heard of all"
