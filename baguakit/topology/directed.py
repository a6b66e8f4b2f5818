"""Directed graphs of one's own: who sends to whom, without being answered."""

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..arguments import shown
from .given import Given
from .graph import nodes_and_edges, ranks_of

Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, init=False, repr=False)
class FromDigraph(Given):
    """Who sends to whom; each rank divides what it has evenly among itself and those it sends to.

        w_ij = 1 / (1 + d_j)    where j sends to i, or j = i;    d_j the number of ranks that j sends to

        FromDigraph(networkx.DiGraph(...))          FromDigraph([(0, 1), (1, 2), (2, 0), (0, 2)])
        FromDigraph([[(0, 1)], [(1, 2), (2, 0)]])                              one graph for each round of a period

    Columns sum to 1 and rows need not: sums over the ranks are kept and means are not, so this is for `push_sum` and
    `gradient_tracking(order="push_sum")`, which divide by what each rank has been given. Every rank must reach every
    other, over the rounds of a period; a graph where one does not is refused. Loops and repeated edges are ignored.

    A value: it holds pairs of ranks, so that it compares, hashes and prints.

    Args:
        graph: anything with `nodes` and `edges`, such as a networkx digraph, or pairs (sender, hearer) of nodes; or a
            sequence of either, for the rounds 0, 1, 2, …, all with the same nodes.
        order: the nodes by rank; by default nodes that are 0, 1, … n − 1 are the ranks themselves.

    Raises:
        TypeError: this is no graph.
        ValueError: a rank never hears of another, a graph is empty, or `order` does not name the nodes once each.
    """

    rounds: tuple[Edges, ...]
    size: int
    facts = ("column_stochastic",)  # what a rank gives away and what it keeps are all that it has

    def __init__(self, graph: Any, order: Iterable[Hashable] | None = None) -> None:
        if isinstance(graph, str | bytes):
            raise TypeError(f"graph of FromDigraph is a networkx graph or pairs of nodes, not {shown(graph)}")
        listed = [nodes_and_edges(each, "FromDigraph") for each in _rounds(graph)]
        nodes = list(dict.fromkeys(node for some, _ in listed for node in some))
        rank = ranks_of(nodes, order)
        for strange in (node for _, pairs in listed for pair in pairs for node in pair if node not in rank):
            raise ValueError(f"an edge of the graph ends at {strange!r}, which is not among its nodes")
        rounds = tuple(
            tuple(sorted({(rank[sender], rank[hearer]) for sender, hearer in pairs if sender != hearer}))
            for _, pairs in listed
        )
        object.__setattr__(self, "rounds", rounds)
        object.__setattr__(self, "size", len(rank))
        _check_reach(sorted(rank, key=lambda node: rank[node]), {edge for edges in rounds for edge in edges})

    @property
    def ranks(self) -> int:
        """The number of nodes."""
        return self.size

    def period(self, size: int) -> int:
        """The number of graphs."""
        self.check(size)
        return len(self.rounds) if size > 1 else 1

    def links(self, rank: int, size: int, round: int) -> Iterator[tuple[int, float]]:
        """Yield the rank and those that send to it."""
        senders, targets = self._by_rank[round % len(self.rounds)]
        return ((peer, 1 / (1 + len(targets[peer]))) for peer in (rank, *senders[rank]))

    def targets(self, rank: int, size: int, round: int) -> tuple[int, ...]:
        """The ranks that this one sends to."""
        self.weights(rank, size, round)  # checks the arguments
        return tuple(self._by_rank[round % len(self.rounds)][1][rank]) if size > 1 else ()

    def symmetric(self, size: int) -> bool:
        """Whether everyone is answered, with the same weight."""
        self.check(size)
        return all(
            set(edges) == {(b, a) for a, b in edges} and all(len(t) == len(targets[0]) for t in targets)
            for edges, (_, targets) in zip(self.rounds, self._by_rank, strict=True)
        )

    def doubly_stochastic(self, size: int) -> bool:
        """Whether every rank hears as much as it gives: the graph is as regular as a ring."""
        return super(Given, self).doubly_stochastic(size)

    @cached_property
    def _by_rank(self) -> list[tuple[list[list[int]], list[list[int]]]]:
        """For each round, the senders to each rank and the targets of each rank."""
        rounds = []
        for edges in self.rounds:
            senders: list[list[int]] = [[] for _ in range(self.size)]
            targets: list[list[int]] = [[] for _ in range(self.size)]
            for sender, hearer in edges:
                senders[hearer].append(sender)
                targets[sender].append(hearer)
            rounds.append((senders, targets))
        return rounds

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        lists = [self._edges(edges) for edges in self.rounds]
        entries = sum(2 * len(edges) for edges in self.rounds)
        shown = lists if len(lists) > 1 else lists[0]
        return self._shown(entries, shown, f"{self.size} ranks, {entries // 2} edges")


def _rounds(graph: Any) -> list[Any]:
    """The graph of each round: one, unless what is given is a sequence of graphs."""
    if hasattr(graph, "nodes"):
        return [graph]
    try:
        listed = list(graph)
    except TypeError:
        return [graph]
    first = listed[0] if listed else None
    pair = isinstance(first, tuple | list) and len(first) in (2, 3) and not isinstance(first[0], tuple | list)
    return [listed] if first is None or pair else listed


def _check_reach(nodes: list[Any], edges: set[tuple[int, int]]) -> None:
    for forward in (True, False):
        following: dict[int, list[int]] = {}
        for a, b in edges:
            following.setdefault(a if forward else b, []).append(b if forward else a)
        reached, ahead = {0}, [0]
        while ahead:
            new = set(following.get(ahead.pop(), ())) - reached
            reached |= new
            ahead += new
        for rank in range(len(nodes)):
            if rank not in reached:
                lost, other = (nodes[rank], nodes[0]) if forward else (nodes[0], nodes[rank])
                raise ValueError(
                    f"node {lost!r} never hears of node {other!r}, not even through others, so that the ranks would "
                    "never agree; add an edge"
                )
