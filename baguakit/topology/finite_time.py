"""Finite-time topologies: the exact mean for every number of ranks, after a number of rounds that grows with log n."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import zip_longest

from ..arguments import integer
from .base import Topology
from .periodic import OnePeerExponential

Row = tuple[tuple[int, float], ...]
Edges = dict[tuple[int, int], Fraction]  # the weights of one round, in both directions


@dataclass(frozen=True, repr=False)
class BaseK(Topology):
    """The Base-(k+1) graph: each rank averages with at most k others per round; exact after T(n) rounds, for every n.

    The rounds combine three ways of averaging, such that T(n) is smallest:

        mean      n ≤ k + 1: all ranks average in one round.                             T = 1
        product   n = ab: average within blocks of a, then across the b blocks.          T = T(a) + T(b)
        split     n = am + r: average a blocks of m while the r others average themselves;
                  in one round each of the others averages with one rank of each block,
                  weight m/n; average within each block again.                           T = 1 + max(T(am) + T(m), T(r))

    The one round of a split in which blocks and others meet gives both the mean of all ranks: each of the others
    becomes (am/n) mean of the blocks + (r/n) itself, and each block gains m (others − blocks) / n from each of the r
    others. The others may continue to average after it, since all are shifted and scaled equally. For n = 2^j and
    k = 1 this is `Hypercube`.

    Rounds T(n), with those of the paper's graph in brackets if it takes more:

        n       2   3   4   5   6   7     8   9     12  16  25    31  32  48  64  100     128
        k = 1   1   3   2   5   4   5     3   6(7)  5   4   9     9   5   7   6   11      7
        k = 2   1   1   2   3   2   3(4)  3   2     3   4   5(6)  6   5   5   6   7(8)    7
        k = 3   1   1   1   2   2   3     2   2     2   2   4     5   3   3   3   5(6)    4

    T ≤ 2 log_{k+1} n + 2. Some ranks are idle in some rounds. Period T, symmetric, doubly stochastic, static for
    n ≤ k + 1 only; exact after T rounds that begin at round 0 or at a multiple of T.

    Args:
        k: the largest number of peers of a rank in one round, 1 or more.

    Raises:
        ValueError: `k` is less than 1.

    Takezawa, Sato, Bao, Niwa and Yamada 2023, "Beyond Exponential Graph: Communication-Efficient Topologies for
    Decentralized Learning via Finite-time Convergence", arXiv:2305.11420, whose blocks are powers of k + 1.
    """

    k: int
    facts = ("symmetric", "doubly_stochastic")  # peers hear each other; rows sum to 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", integer("k", self.k, 1))

    def links(self, rank: int, size: int, round: int) -> Iterable[tuple[int, float]]:
        rounds = _rows(self.k, size)
        return rounds[round % len(rounds)][rank]

    def period(self, size: int) -> int:
        """Return T(n); 1 for one rank."""
        return max(1, self.rounds_to_exactness(size))

    def rounds_to_exactness(self, size: int) -> int:
        """Return T(n); 0 for one rank."""
        return _fewest(self.k, size)[0]


@dataclass(frozen=True)
class OnePeerExact(Topology):
    """A topology with at most one peer per rank and round, exact after finitely many rounds for every n.

        OnePeerExponential()  for n = 2^k,  exact after log₂ n rounds;      BaseK(1)  otherwise

    The default of `decentralized`, which is declared before the size of the group is known. Doubly stochastic;
    symmetric unless n = 4, 8, 16, …: if symmetry is required, use BaseK(1).
    """

    facts = ("doubly_stochastic",)  # as both of them are

    def links(self, rank: int, size: int, round: int) -> Iterable[tuple[int, float]]:
        return self._for(size).links(rank, size, round)

    def period(self, size: int) -> int:
        """Return log₂ n for n = 2^k; the period of BaseK(1) for other n."""
        return self._for(size).period(size)

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        return self._for(size).targets(rank, size, round)

    def symmetric(self, size: int) -> bool:
        return self._for(size).symmetric(size)

    def rounds_to_exactness(self, size: int) -> int | None:
        """Return log₂ n for n = 2^k; the number of rounds of BaseK(1) for other n."""
        return self._for(size).rounds_to_exactness(size)

    def _for(self, size: int) -> Topology:
        return BaseK(1) if size & (size - 1) else OnePeerExponential()


@lru_cache(maxsize=1 << 16)
def _fewest(k: int, n: int) -> tuple[int, tuple[int, ...]]:
    """Return T(n) and the way to reach it: () for a mean, (a,) for a product, (a, m) for a split."""
    if n <= k + 1:
        return min(n - 1, 1), ()
    products = [(_fewest(k, a)[0] + _fewest(k, n // a)[0], (a,)) for a in range(2, n) if n % a == 0]
    splits = [
        (1 + max(_fewest(k, a * m)[0] + _fewest(k, m)[0], _fewest(k, n - a * m)[0]), (a, m))
        for m in range(1, n)
        if _is_product_of_small(m, k + 1)  # other blocks are never faster
        for a in range(1, k + 1)
        if 0 < n - a * m <= k * m
    ]
    return min([*products, *splits], key=lambda plan: plan[0])


def _is_product_of_small(m: int, largest: int) -> bool:
    """Return whether m is a product of numbers up to `largest`: m ranks average in one round per factor."""
    for factor in range(2, largest + 1):
        while m % factor == 0:
            m //= factor
    return m == 1


@lru_cache(maxsize=256)
def _edges(k: int, n: int) -> tuple[Edges, ...]:
    """Return the rounds that give n ranks the exact mean."""
    if n == 1:
        return ()
    match _fewest(k, n)[1]:
        case (a,):
            b = n // a
            within = _side_by_side(_edges(k, a), [[block * a + i for i in range(a)] for block in range(b)])
            across = _side_by_side(_edges(k, b), [[block * a + i for block in range(b)] for i in range(a)])
            return (*within, *across)
        case (a, m):
            blocks = [range(block * m, (block + 1) * m) for block in range(a)]
            others = range(a * m, n)
            meeting = {(block[i % m], other): Fraction(m, n) for block in blocks for i, other in enumerate(others)}
            before = _edges(k, a * m)
            after = _side_by_side(_edges(k, m), blocks)
            among = _side_by_side(_edges(k, len(others)), [others])
            return (*_at_once(before, among[: len(before)]), meeting, *_at_once(after, among[len(before) :]))
    return ({(i, j): Fraction(1, n) for i in range(n) for j in range(i + 1, n)},)


def _side_by_side(rounds: Iterable[Edges], groups: Iterable[Iterable[int]]) -> tuple[Edges, ...]:
    """Return the given rounds, run in all groups of ranks at the same time."""
    named = [list(group) for group in groups]
    return tuple({(names[i], names[j]): w for names in named for (i, j), w in edges.items()} for edges in rounds)


def _at_once(some: tuple[Edges, ...], others: tuple[Edges, ...]) -> Iterator[Edges]:
    """Return the rounds of disjoint groups of ranks merged; a group with fewer rounds is idle at the end."""
    idle: Edges = {}
    return (one | other for one, other in zip_longest(some, others, fillvalue=idle))


@lru_cache(maxsize=256)
def _rows(k: int, n: int) -> tuple[tuple[Row, ...], ...]:
    """Return the row of each rank in each round; weights are fractions until here, so that each is rounded once."""
    rounds = []
    for edges in _edges(k, n):
        rows: list[dict[int, Fraction]] = [{rank: Fraction(1)} for rank in range(n)]
        for (i, j), weight in edges.items():
            for rank, peer in ((i, j), (j, i)):
                rows[rank][peer] = weight
                rows[rank][rank] -= weight
        rounds.append(tuple(tuple((peer, float(weight)) for peer, weight in row.items()) for row in rows))
    return tuple(rounds)
