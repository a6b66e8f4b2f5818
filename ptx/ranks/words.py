"""Words that order accesses: what was released by a write travels with its value to those who read it and acquire.

PTX ISA, section 8.8: a release is a write with `.release`, or a fence and then a strong write; an acquire is a read
with `.acquire`, or a strong read and then a fence. An atomic operation passes on what it has read.
"""

from dataclasses import dataclass, field

import numpy as np

from ..instructions.strength import SCOPES, Strength
from .clocks import Clock, Clocks, least
from .shadow import reaches


@dataclass(frozen=True)
class Released:
    """Hold the clock of what comes before writes, for those that a scope around the writers' (rank, CTA) includes."""

    clock: Clock
    scope: int
    who: tuple[tuple[int, int], ...]

    def reaches(self, scope: int, who: tuple[int, int]) -> bool:
        """Return whether this scope and that of a read include each other's threads, for all that have written."""
        return all(reaches(self.scope, each, who) and reaches(scope, who, each) for each in self.who)


@dataclass
class Word:
    """A word of memory: how often it has changed, its value, who wrote it, and what was released with it."""

    changes: int = 0
    value: int | None = None
    writers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    epochs: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    released: list[Released] = field(default_factory=list)
    behind: dict[bytes, list[Released]] = field(default_factory=dict)  # by threads, what they released here last


class Words:
    """Words by their addresses; of each thread its last fences, and what it has read and not yet acquired."""

    def __init__(self, clocks: Clocks):
        self.clocks = clocks
        self.words: dict[int, Word] = {}
        self.fences: dict[int, list[tuple[int, Clock]]] = {}  # by thread: scope and clock, the last of each scope
        self.read: dict[int, dict[int, list[Released]]] = {}  # by thread and address
        self.waits: set[tuple[int, int]] = set()  # which of those are waits

    def fenced(self, threads: np.ndarray, strength: Strength, who: tuple[int, int]) -> None:
        """A fence: what was read is acquired, and what follows may release what came before."""
        for thread in threads.tolist():
            for address, released in self.read.pop(thread, {}).items():
                self._acquire(np.array([thread]), released, strength.scope, who)
                self.waits.discard((thread, address))
        for thread in threads.tolist():
            kept = [each for each in self.fences.get(thread, ()) if each[0] > strength.scope]
            self.fences[thread] = [*kept, (strength.scope, self.clocks.known(np.array([thread])))]
        self.clocks.passed(threads)

    def _acquire(self, threads, released, scope, who):
        for each in released:
            if each.reaches(scope, who):
                self.clocks.learn(threads, each.clock)

    def load(self, address: int, threads: np.ndarray, strength: Strength, who, waits: bool = True) -> None:
        """Threads read a word together; `waits` if what they read must be acquired."""
        word = self.words.get(address)
        released = word.released if word else []
        if strength.acquires:
            for thread in threads.tolist() if self.read else ():
                released = [*released, *self.read.get(thread, {}).pop(address, ())]
                self.waits.discard((thread, address))
            self._acquire(threads, released, strength.scope, who)
        elif released:
            for thread in threads.tolist():
                self.read.setdefault(thread, {})[address] = released
                if waits:
                    self.waits.add((thread, address))

    def store(self, address: int, value: int, threads: np.ndarray, strength: Strength, who, passes_on: bool) -> None:
        """Threads write a value to a word in one instruction; an atomic operation passes on what was released."""
        word = self.words.setdefault(address, Word())
        released = self._released(threads, strength, who)
        if strength.releases:
            word.behind[threads.tobytes()] = released
        else:  # a strong write behind a release of the same threads
            released = [*released, *word.behind.get(threads.tobytes(), ())]
        if passes_on:
            released = [*word.released, *released]
        elif word.value == value and len(word.writers):
            known = self.clocks.know(threads[:, None], word.writers[None], word.epochs[None])
            if not known.all():  # a reader may have its value from either
                released = self._either(word.released, released)
        word.changes += word.value != value
        word.value, word.released = value, _merged(released)
        word.writers, word.epochs = threads, self.clocks.epoch[threads]
        if strength.releases:
            self.clocks.passed(np.unique(threads))

    def _released(self, threads, strength, who):
        if strength.releases:
            return [Released(self.clocks.known(threads), strength.scope, (who,))]
        fences = [self.fences.get(thread) for thread in threads.tolist()]
        if not all(fences):
            return []
        found = []
        for scope in SCOPES.values():  # of each thread the last fence of that scope or a wider one
            clocks = [next((clock for level, clock in each[::-1] if level >= scope), None) for each in fences]
            if all(clock is not None for clock in clocks):
                found.append(Released(least(clocks), scope, (who,)))
        return found

    def _either(self, one, other):
        if not one or not other:
            return []
        clock = least([np.maximum.reduce([each.clock for each in part]) for part in (one, other)])
        who = sorted({who for each in (*one, *other) for who in each.who})
        return [Released(clock, min(each.scope for each in (*one, *other)), tuple(who))]

    def unread(self, threads: np.ndarray) -> dict[int, int]:
        """Return, by thread, the address of a word that released what the thread has read and not acquired."""
        found = {}
        for thread in threads.tolist() if self.read else ():
            for address, released in self.read.get(thread, {}).items():
                for each in released if (thread, address) in self.waits else ():
                    if not (self.clocks.known(np.array([thread])) >= each.clock).all():
                        found[thread] = address
        return found


def _merged(released):
    """Join what is for the same: a read whose scope includes one that has written may not include another."""
    joined: dict = {}
    for each in released:
        joined.setdefault((each.scope, each.who), []).append(each.clock)
    return [Released(np.maximum.reduce(clocks), *key) for key, clocks in joined.items()]
