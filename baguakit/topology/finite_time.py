"""Finite time: the exact mean for every number of ranks, in a number of rounds that grows with log n."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from ..arguments import whole
from .base import Topology
from .periodic import OnePeerExponential

Row = tuple[tuple[int, float], ...]
Edges = dict[tuple[int, int], Fraction]  # the links of one round; whoever hears is heard


@dataclass(frozen=True, repr=False)
class BaseK(Topology):
    """Each rank meets at most k others in a round, and after few rounds has the exact mean, for every n.

    The Base-(k+1) graph. T(n) rounds are put together from three ways of averaging, whichever takes fewest:

        mean      n ≤ k + 1: everyone meets everyone, once.                              T = 1
        product   n = ab: average within blocks of a, then across the b blocks.          T = T(a) + T(b)
        split     n = am + r: average a blocks of m while the r others average themselves;
                  once, each of the others meets one rank of each block, weight m/n;
                  average within each block again.                                       T = 1 + max(T(am) + T(m), T(r))

    In a split the one meeting gives both sides the mean of all: the others become (am/n) mean of the blocks + (r/n)
    own, and each block gains m (others − blocks) / n, r times over. The others may go on averaging after it, since
    they are shifted and scaled alike. For n = 2^j and k = 1 this is `Hypercube`.

    Rounds, and in brackets those of the paper's graph where it takes more:

        n       2   3   4   5   6   7     8   9     12  16  25    31  32  48  64  100     128
        k = 1   1   3   2   5   4   5     3   6(7)  5   4   9     9   5   7   6   11      7
        k = 2   1   1   2   3   2   3(4)  3   2     3   4   5(6)  6   5   5   6   7(8)    7
        k = 3   1   1   1   2   2   3     2   2     2   2   4     5   3   3   3   5(6)    4

    T ≤ 2 log_{k+1} n + 2. Some ranks are idle in some rounds. Period T, symmetric, doubly stochastic, static for
    n ≤ k + 1 only; exact after T rounds from round 0, or any multiple of T.

    Args:
        k: the most peers that a rank meets in one round, 1 or more.

    Raises:
        ValueError: `k` is less.

    Takezawa, Sato, Bao, Niwa and Yamada 2023, "Beyond Exponential Graph: Communication-Efficient Topologies for
    Decentralized Learning via Finite-time Convergence", arXiv:2305.11420, which takes powers of k + 1 for the blocks.
    """

    k: int
    facts = ("symmetric", "doubly_stochastic")  # whom a rank hears, hears it; rows sum to 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", whole("k", self.k, 1))

    def links(self, rank: int, size: int, round: int) -> Iterable[tuple[int, float]]:
        """Yield the rank and at most k others."""
        rounds = _rows(self.k, size)
        return rounds[round % len(rounds)][rank]

    def period(self, size: int) -> int:
        """T(n), and 1 for one rank."""
        return max(1, self.rounds_to_exactness(size))

    def rounds_to_exactness(self, size: int) -> int:
        """T(n), and 0 for one rank."""
        self.check(size)
        return _fewest(self.k, size)[0]


@dataclass(frozen=True)
class OnePeerExact(Topology):
    """At most one peer per rank and round, and the exact mean in finite time: what the size of the group asks for.

        OnePeerExponential()  for n = 2^k,  exact after log₂ n rounds;      BaseK(1)  otherwise

    The default of `decentralized`, declared before the size of the group is known. Doubly stochastic; symmetric unless
    n = 4, 8, 16, …: where symmetry is asked for, use BaseK(1).
    """

    def links(self, rank: int, size: int, round: int) -> Iterable[tuple[int, float]]:
        """Yield what the topology for this size yields."""
        return self._chosen(size).links(rank, size, round)

    def period(self, size: int) -> int:
        """log₂ n for n = 2^k, otherwise that of BaseK(1)."""
        return self._chosen(size).period(size)

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        """The rank that hears from `rank`, if one does."""
        return self._chosen(size).targets(rank, size, round)

    def symmetric(self, size: int) -> bool:
        """Whether n is 1, 2 or no power of two."""
        return self._chosen(size).symmetric(size)

    def doubly_stochastic(self, size: int) -> bool:
        """True: both are."""
        return self._chosen(size).doubly_stochastic(size)

    def rounds_to_exactness(self, size: int) -> int | None:
        """log₂ n for n = 2^k, otherwise that of BaseK(1)."""
        return self._chosen(size).rounds_to_exactness(size)

    def _chosen(self, size: int) -> Topology:
        self.check(size)
        return BaseK(1) if size & (size - 1) else OnePeerExponential()


@lru_cache(maxsize=1 << 16)
def _fewest(k: int, n: int) -> tuple[int, tuple[int, ...]]:
    """The fewest rounds for n ranks, and how: () for a mean, (a,) for a product, (a, m) for a split."""
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
    """Whether m is a product of numbers up to `largest`, which average in as many rounds as there are factors."""
    for factor in range(2, largest + 1):
        while m % factor == 0:
            m //= factor
    return m == 1


@lru_cache(maxsize=256)
def _edges(k: int, n: int) -> tuple[Edges, ...]:
    """The rounds that give n ranks the exact mean."""
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
            return (
                *_at_once(before, among[: len(before)]),
                meeting,
                *_at_once(after, among[len(before) :]),
            )
    return ({(i, j): Fraction(1, n) for i in range(n) for j in range(i + 1, n)},)


def _side_by_side(rounds: Iterable[Edges], groups: Iterable[Iterable[int]]) -> tuple[Edges, ...]:
    """These rounds in each of the groups of ranks."""
    named = [list(group) for group in groups]
    return tuple({(names[i], names[j]): w for names in named for (i, j), w in edges.items()} for edges in rounds)


def _at_once(some: tuple[Edges, ...], others: tuple[Edges, ...]) -> Iterator[Edges]:
    """Rounds of disjoint groups of ranks, together; the shorter ones then rest."""
    for t in range(max(len(some), len(others))):
        yield {**(some[t] if t < len(some) else {}), **(others[t] if t < len(others) else {})}


@lru_cache(maxsize=256)
def _rows(k: int, n: int) -> tuple[tuple[Row, ...], ...]:
    """Return what each rank hears in each round. Fractions until here, so that every weight is rounded once."""
    rounds = []
    for edges in _edges(k, n):
        rows: list[dict[int, Fraction]] = [{rank: Fraction(1)} for rank in range(n)]
        for (i, j), weight in edges.items():
            for rank, peer in ((i, j), (j, i)):
                rows[rank][peer] = weight
                rows[rank][rank] -= weight
        rounds.append(tuple(tuple((peer, float(weight)) for peer, weight in row.items()) for row in rows))
    return tuple(rounds)
