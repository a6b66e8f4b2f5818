"""Races: the accesses to each byte that may come at the same time as the next one.

PTX ISA, sections 8.6 and 8.9.2: two accesses to a byte, one of which writes, race unless one comes before the other, or
both are morally strong: each orders accesses, with a scope that includes the other's thread. Threads that store the
same in one instruction do not race with one another.

Of plain accesses, a byte keeps the last write and the reads since; of a read that comes before another, only the
other: what follows this follows both. They are columns of arrays. Accesses that order others are few, and are kept as
objects, since such a one may race with a third though it comes before a second.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..instructions.strength import SCOPES, Strength
from .clocks import Clocks

NONE, SEVERAL = -2, -1  # in place of a thread: nobody, or more than one in one event
CTA, GPU, SYS = SCOPES["cta"], SCOPES["gpu"], SCOPES["sys"]
BLOCK = 16  # bytes, by which strong accesses are found


def reaches(scope: int, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return whether a scope around one (rank, CTA) includes another."""
    return scope >= SYS or (one[0] == other[0] and (scope >= GPU or (one[1] == other[1] and scope >= CTA)))


@dataclass(frozen=True)
class Event:
    """An instruction as some threads executed it: `first` numbers the first byte that each has accessed."""

    access: Any
    threads: np.ndarray
    epochs: np.ndarray
    first: np.ndarray
    width: int
    who: tuple[int, int]  # rank and CTA
    strength: Strength
    writes: bool

    @cached_property
    def together(self) -> bool:
        """All threads have accessed the same bytes."""
        return bool((self.first == self.first[0]).all())

    def over(self, byte: int) -> np.ndarray:
        """Return the places of the threads that have accessed a byte."""
        if self.together:
            return np.arange(len(self.threads))
        return np.flatnonzero((self.first <= byte) & (byte < self.first + self.width))


@dataclass(frozen=True)
class Race:
    """Two events' threads access a byte."""

    other: Event
    byte: int
    thread_of_other: int
    thread: int


class _Slot:
    """One plain access for each byte."""

    def __init__(self, size):
        self.thread = np.full(size, NONE, np.int32)
        self.epoch, self.event = np.zeros(size, np.int32), np.zeros(size, np.int32)

    def grow(self, size):
        more = _Slot(size - len(self.thread))
        for name, column in vars(self).items():
            setattr(self, name, np.concatenate([column, getattr(more, name)]))

    def put(self, bytes_, thread, epoch, event):
        self.thread[bytes_], self.epoch[bytes_], self.event[bytes_] = thread, epoch, event


class Shadow:
    """Keep the accesses to each byte, as far as a later access may race with them."""

    def __init__(self, clocks: Clocks):
        self.clocks, self.size, self.events = clocks, 0, []
        self.written, self.read = _Slot(0), []
        self.kept = 4096  # events, before those are forgotten that no byte has
        self.strong: dict[int, list[tuple[int, Event]]] = {}  # by block, first bytes and events
        self.ordering = np.zeros(0, bool)  # the bytes that strong accesses have accessed

    def grow(self, size: int) -> None:
        if size > self.size:
            for slot in (self.written, *self.read):
                slot.grow(size)
            self.ordering = np.concatenate([self.ordering, np.zeros(size - self.size, bool)])
            self.size = size

    def add(self, event: Event, same: np.ndarray | None) -> Race | None:
        """Note an event; return how it races, if it does.

        Args:
            same: for events that write: the bytes that are written, a row for each thread; None if they may differ.
        """
        bytes_ = (event.first[:, None] + np.arange(event.width)).ravel()
        place = np.repeat(np.arange(len(event.threads)), event.width)
        single, which = np.unique(bytes_, return_index=True)
        several = len(single) < len(bytes_)
        found = self._differs(event, bytes_, place, same.ravel()) if several and same is not None else None
        for slot in (self.written, *(self.read if event.writes else ())):
            found = found or self._conflict(slot, event, bytes_, place)
        if self.strong and self.ordering[single].any():
            found = found or self._conflict_with_strong(event)
        if event.strength.scope:
            self.ordering[single] = True
            self._keep_strong(event)
            return found
        self.events.append(event)
        if len(self.events) > self.kept:
            self._forget()
        threads, epochs = event.threads[place[which]], event.epochs[place[which]]
        if several:
            count = np.bincount(np.searchsorted(single, bytes_))
            threads = np.where(count > 1, SEVERAL, threads)
        if event.writes:
            self.written.put(single, threads, epochs, len(self.events) - 1)
            for slot in self.read:
                slot.thread[single] = NONE
        else:
            self._keep_read(event, single, threads, epochs)
        return found

    def _forget(self):
        """Keep those events alone that a byte still has, and the last."""
        slots = (self.written, *self.read)
        still = np.unique(np.concatenate([slot.event[slot.thread != NONE] for slot in slots]))
        for slot in slots:
            slot.event = np.searchsorted(still, slot.event).astype(np.int32)
        self.events = [self.events[each] for each in still] + self.events[-1:]
        self.kept = max(4096, 2 * len(self.events))

    def _differs(self, event, bytes_, place, values):
        """Two threads of one instruction write a byte unlike."""
        order = np.argsort(bytes_, kind="stable")
        unlike = (np.diff(bytes_[order]) == 0) & (np.diff(values[order].astype(np.int16)) != 0)
        if not unlike.any():
            return None
        one = int(np.argmax(unlike))
        two = event.threads[place[order[[one, one + 1]]]]
        return Race(event, int(bytes_[order[one]]), int(two[0]), int(two[1]))

    def _known(self, event, new, other, old):
        """For each of some threads of an event, and of an earlier one, whether that one's access comes before."""
        return self.clocks.know(event.threads[new][:, None], other.threads[old][None], other.epochs[old][None])

    def _apart(self, event, other, byte):
        """The race of two events at a byte, if some threads of the second do not follow some of the first."""
        old, new = other.over(byte), event.over(byte)
        ordered = self._known(event, new, other, old)
        if ordered.all():
            return None
        one, two = np.argwhere(~ordered)[0]
        return Race(other, byte, int(other.threads[old[two]]), int(event.threads[new[one]]))

    # Plain accesses.

    def _conflict(self, slot, event, bytes_, place):
        before = slot.thread[bytes_]
        there = np.flatnonzero(before != NONE)
        if not len(there):
            return None
        bytes_, before, threads = bytes_[there], before[there], event.threads[place[there]]
        unknown = ~self.clocks.know(threads, np.maximum(before, 0), slot.epoch[bytes_]) & (before != SEVERAL)
        if unknown.any():
            at = int(np.argmax(unknown))
            return Race(self.events[slot.event[bytes_[at]]], int(bytes_[at]), int(before[at]), int(threads[at]))
        races = (self._apart(event, *each) for each in self._of_several(slot, event, bytes_[before == SEVERAL]))
        return next((race for race in races if race), None)

    def _of_several(self, slot, event, bytes_) -> Iterator[tuple[Event, int]]:
        """Yield events in a slot and bytes, of bytes that the same threads have accessed only one."""
        done = set()
        for byte in np.unique(bytes_).tolist():
            number = slot.event[byte]
            other = self.events[number]
            key = number, None if other.together and event.together else byte
            if key not in done:
                done.add(key)
                yield other, byte

    def _keep_read(self, event, bytes_, threads, epochs):
        """Put reads where there is none, or one that comes before."""
        left, number = np.ones(len(bytes_), bool), len(self.events) - 1
        for slot in self.read:
            free = left & (slot.thread[bytes_] == NONE)
            occupied = np.flatnonzero(left & ~free)
            if len(occupied):
                free[occupied] = self._before(slot, event, bytes_[occupied], threads[occupied])
            slot.put(bytes_[free], threads[free], epochs[free], number)
            left &= ~free
            if not left.any():
                return
        self.read.append(_Slot(self.size))
        self.read[-1].put(bytes_[left], threads[left], epochs[left], number)

    def _before(self, slot, event, bytes_, threads):
        """Return which bytes' reads in a slot all come before some thread's read in an event."""
        before = slot.thread[bytes_]
        simple = (before != SEVERAL) & (threads != SEVERAL)
        found = np.zeros(len(bytes_), bool)
        if simple.any():
            found[simple] = self.clocks.know(threads[simple], before[simple], slot.epoch[bytes_[simple]])
        judged = {}
        for at in np.flatnonzero(~simple):
            byte, number = int(bytes_[at]), slot.event[bytes_[at]]
            other = self.events[number]
            key = number, None if other.together and event.together else byte
            if key not in judged:
                judged[key] = self._known(event, event.over(byte), other, other.over(byte)).any(axis=0).all()
            found[at] = judged[key]
        return found

    # Accesses that order others.

    def _conflict_with_strong(self, event):
        """Look for one that an event does not follow, and with which it is not morally strong."""
        for first in np.unique(event.first).tolist():
            for block in _blocks(first, event.width):
                for at, other in self.strong.get(block, ()):
                    low, high = max(first, at), min(first + event.width, at + other.width)
                    conflict = low < high and (event.writes or other.writes) and not _both_strong(event, other)
                    if conflict and (race := self._apart(event, other, low)):
                        return race
        return None

    def _keep_strong(self, event):
        """Keep it in place of one of its program that it follows, is no stronger than, and conflicts with as much."""
        for first in np.unique(event.first).tolist():
            for block in _blocks(first, event.width):
                kept = [each for each in self.strong.get(block, ()) if not self._replaces(event, first, *each)]
                self.strong[block] = [*kept, (first, event)]

    def _replaces(self, event, first, at, other):
        alike = (at, other.width, other.who) == (first, event.width, event.who)
        if not alike or event.strength.scope > other.strength.scope or event.writes < other.writes:
            return False
        return self._known(event, event.over(first), other, other.over(first)).any(axis=0).all()


def _blocks(first, width):
    return range(first // BLOCK, (first + width - 1) // BLOCK + 1)


def _both_strong(one, other):
    return reaches(one.strength.scope, one.who, other.who) and reaches(other.strength.scope, other.who, one.who)
