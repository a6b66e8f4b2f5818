"""Orders in which programs run: drawn from a seed, or all within a bound on preemptions.

An order is asked, whenever more than one program can go on, which does. *Preemption* means that another goes on though
the last one could. Every order is run from its beginning (Musuvathi and Qadeer 2007, "Iterative Context Bounding for
Systematic Testing of Multithreaded Programs").
"""

import random
from collections.abc import Callable, Hashable, Iterator


class Order:
    """A program goes on until it waits; then the first that can.

    Attributes:
        choices: the place of each choice among the programs that could go on.
    """

    name = "the fixed order"

    def __init__(self) -> None:
        self.choices: list[int] = []

    def choose(self, able: list, current: object, state: Callable[[], tuple]) -> int:
        """Return the place of the program that goes on.

        Args:
            able: the programs that can, in the order of ranks.
            current: the one that ran last.
            state: what has happened so far, but for the order of what may come in any: of each program, a tuple that
                begins with it.
        """
        self.choices.append(self._choose(able, current, state))
        return self.choices[-1]

    def touched(self, program: Hashable, word: Hashable, writes: bool) -> None:
        """Hear that a program has read or written a word that orders accesses."""

    def _choose(self, able, current, state):
        return able.index(current) if current in able else 0


class Drawn(Order):
    """An order drawn from a seed.

    With even seeds every program is as likely as any other, each time. With odd ones a program has a priority, and the
    highest runs; now and then one of them falls to the lowest, so that some come far ahead of others (Burckhardt and
    others 2010, "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs").
    """

    def __init__(self, seed: int):
        super().__init__()
        self.seed, self.name = seed, f"the order drawn from seed {seed}"
        self.random, self.priorities = random.Random(seed), {}
        self.falls = self.random.choice((0.02, 0.1, 0.3))

    def _choose(self, able, current, state):
        if self.seed % 2 == 0:
            return self.random.randrange(len(able))
        for each in able:
            self.priorities.setdefault(each, self.random.random())
        first = max(range(len(able)), key=lambda place: self.priorities[able[place]])
        if self.random.random() < self.falls:
            self.priorities[able[first]] = min(self.priorities.values()) - 1
        return first


class Known:
    """Keep what the orders run so far have shown.

    Attributes:
        states: where each has been, and with how many preemptions left.
        changed: programs were found to be related that were not known to be.
    """

    def __init__(self) -> None:
        self.states: dict[Hashable, int] = {}
        self.changed = False
        self._leads: dict[Hashable, Hashable] = {}

    def group(self, key: Hashable) -> Hashable:
        """Return what a program has in common with all that are related to it: the least of them, or a word."""
        while self._leads.get(key, key) != key:
            key = self._leads[key]
        return key

    def relate(self, one: Hashable, other: Hashable) -> None:
        """Two programs have accessed one word, which one of them writes."""
        first, second = sorted((self.group(one), self.group(other)))
        if first != second:
            self._leads[second] = first
            self.changed = True


class Bounded(Order):
    """An order that begins with given choices and goes on as `Order` does.

    Programs that are not related, by words that they both access, run one group after another: orders in which their
    turns are mixed otherwise differ in nothing.

    Attributes:
        others: the beginnings of orders that differ from this one after its own beginning.
    """

    def __init__(self, begin: tuple[int, ...], left: int, known: Known):
        super().__init__()
        self.begin, self.left, self.known = begin, left, known
        self.name = f"the order that begins with the choices {list(begin)}"
        self.others: list[tuple[tuple[int, ...], int]] = []
        self.ended = False
        self._been: set[Hashable] = set()
        self._readers: dict[int, set] = {}
        self._writers: dict[int, set] = {}

    def touched(self, program, word, writes):
        readers, writers = self._readers.setdefault(word, set()), self._writers.setdefault(word, set())
        if writes and program not in writers:
            writers.add(program)
            for each in readers | writers:
                self.known.relate(program, each)
        elif not writes and program not in readers:
            readers.add(program)
            for each in writers:
                self.known.relate(program, each)

    def _choose(self, able, current, state):
        place = len(self.choices)
        groups = [self.known.group(each) for each in able]
        group = self.known.group(current) if current in able else min(groups)
        related = [at for at, each in enumerate(groups) if each == group]
        first = able.index(current) if current in able else related[0]
        if place < len(self.begin):
            return self.begin[place]
        seen = tuple(each for each in state() if self.known.group(each[0]) == group)
        here = (seen, group, current if current in able else None)
        before = -1 if here in self._been else self.known.states.get(here, -1)
        if self.ended or before >= self.left:
            self.ended = True  # another order has gone on from here
            return first
        self.known.states[here] = self.left
        self._been.add(here)
        left = self.left if current not in able else self.left - 1
        if left >= 0:
            self.others += [((*self.choices, other), left) for other in related if other != first]
        return first


def drawn(count: int, seed: int = 0) -> Iterator[Order]:
    """Yield orders drawn from seeds `seed`, `seed + 1`, …"""
    for each in range(seed, seed + count):
        yield Drawn(each)


def every(preemptions: int) -> Iterator[Order]:
    """Yield all orders with at most so many preemptions; each must have run before the next is asked for.

    Two orders that differ in the order of independent accesses alone are one: of the second nothing more is tried from
    where it comes to the same state. Programs that access no word of which one of them writes are tried apart, each
    group with as many preemptions; if a run shows that some have one, all begins anew.
    """
    known, left = Known(), [((), preemptions)]
    while left:
        order = Bounded(*left.pop(), known)
        yield order
        left += order.others
        if known.changed:
            known.states.clear()
            known.changed, left = False, [((), preemptions)]
